"""A part of a file as the body of a request."""

from __future__ import annotations

import io
import os
from pathlib import Path

from polyturn.errors import StorageError
from polyturn.storage.progress import tick


class Section(io.RawIOBase):
    """A part of a file as a request's body; every piece that is sent is a tick."""

    def __init__(self, file: Path, start: int, num_bytes: int) -> None:
        super().__init__()
        self._file = file.open("rb", buffering=0)
        self._start = start
        self._num_bytes = num_bytes
        self._at = 0

    def __len__(self) -> int:
        return self._num_bytes

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes: a request that is sent again starts over."""
        return True

    def tell(self) -> int:
        """Place in this part."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place in this part."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = min(max(0, base + offset), self._num_bytes)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes."""
        left = self._num_bytes - self._at
        count = left if size is None or size < 0 else min(size, left)
        piece = os.pread(self._file.fileno(), count, self._start + self._at) if count else b""
        if count and not piece:
            raise StorageError(f"{self._file.name} became shorter while it was stored")
        self._at += len(piece)
        tick(len(piece))
        return piece

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
