"""Places that hold files, all behind one protocol."""

from polyturn.storage.stores.base import AccessError, Entry, MissingKeyError, Store
from polyturn.storage.stores.local import LocalStore
from polyturn.storage.stores.s3 import Encryption, ObjectStore

__all__ = ["AccessError", "Encryption", "Entry", "LocalStore", "MissingKeyError", "ObjectStore", "Store"]
