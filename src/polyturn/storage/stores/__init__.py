"""Places that hold files, all behind one protocol."""

from polyturn.storage.stores.base import AccessError, Entry, MissingKeyError, Store
from polyturn.storage.stores.local import LocalStore

__all__ = ["AccessError", "Entry", "LocalStore", "MissingKeyError", "Store"]
