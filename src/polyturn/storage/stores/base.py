"""What every store of files can do, and how its work is watched.

A store holds files under keys such as `lookup/step_00000042/model.0`. A file appears whole or not at all, and whatever goes
wrong is a `StorageError`, never a half-written file under its own name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from polyturn.errors import StorageError


class MissingKeyError(StorageError):
    """There is no file under this key. The store itself is well."""


class BadKeyError(StorageError):
    """A key that no store takes."""


class AccessError(StorageError):
    """The store refuses us: no, wrong or expired credentials, or no permission."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a store: its key, its size, and when it was last written in seconds since 1970 by the store's clock."""

    key: str
    num_bytes: int
    modified: float


@runtime_checkable
class Store(Protocol):
    """A place for files.

    Every method raises StorageError when the place can't be reached or refuses, and KeyError's counterpart here,
    MissingKeyError, where a key is asked for that is not there.
    """

    @property
    def url(self) -> str:
        """Where it is, as users write it, without credentials."""
        ...

    def put(self, file: Path, key: str, *, link: bool = False) -> None:
        """Store a local file, replacing what is there. `link`: nobody ever writes to `file` again, so it may be shared."""
        ...

    def get(self, key: str, file: Path, *, link: bool = False) -> None:
        """Write a stored file to `file`, which appears whole. `link`: nobody ever writes to it, so it may be shared."""
        ...

    def read(self, key: str) -> bytes:
        """Content of a small file."""
        ...

    def chunks(self, key: str) -> Iterator[bytes]:
        """Content of a file in pieces."""
        ...

    def list(self, prefix: str) -> list[Entry]:
        """Files whose keys start with `prefix`, by key; what is not yet whole is not among them."""
        ...

    def delete(self, key: str) -> None:
        """Remove a file; nothing happens where there is none."""
        ...

    def exists(self, key: str) -> bool:
        """Whether there is a file under this key."""
        ...

    def put_if_absent(self, content: bytes, key: str) -> bool:
        """Store a small file where there is none. False, and nothing changed, where another one is there already."""
        ...

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Remove what writers that died left unfinished under `prefix`, older than this; how many pieces."""
        ...


def check_key(key: str) -> str:
    """The key itself. Raises BadKeyError for one that could leave its store, or that some store can't hold.

    >>> check_key("lookup/step_00000042/.metadata")
    'lookup/step_00000042/.metadata'
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(ord(letter) < 32 or letter == "\\" for letter in key):
        raise BadKeyError(f"the key {key!r} is not allowed: its parts must be plain names, divided by single slashes")
    if len(key.encode("utf-8", "surrogatepass")) > 900:
        raise BadKeyError(f"the key {key[:60]!r}... is too long: at most 900 bytes")
    return key
