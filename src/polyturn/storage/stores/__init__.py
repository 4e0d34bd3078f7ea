"""Places that hold files, all behind one protocol."""

from polyturn.storage.stores.base import AccessError, Entry, MissingKeyError, Store
from polyturn.storage.stores.local import LocalStore
from polyturn.storage.stores.open import Access, open_store
from polyturn.storage.stores.s3 import Encryption, ObjectStore

__all__ = [
    "Access",
    "AccessError",
    "Encryption",
    "Entry",
    "LocalStore",
    "MissingKeyError",
    "ObjectStore",
    "Store",
    "open_store",
]
