"""The end of what a child process writes to its error output, kept for the sentence about its death."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TextIO

KEPT_CHARS = 400
_CHUNK = 4096


class Tail:
    """A pipe for a child's error output, and the last of what came through it. A child that is never started costs nothing."""

    def __init__(self) -> None:
        self._kept: deque[bytes] = deque(maxlen=2)
        self._writer: TextIO | None = None
        self._reader: threading.Thread | None = None

    def open(self) -> TextIO:
        """The end to give to the child."""
        read_end, write_end = os.pipe()
        self._writer = os.fdopen(write_end, "w")
        self._reader = threading.Thread(target=self._read, args=(read_end,), name="error output of a child", daemon=True)
        self._reader.start()
        return self._writer

    def release(self) -> None:
        """Close our copy once the child has its own, so that the pipe ends with the child."""
        if self._writer is not None:
            self._writer.close()

    def close(self) -> None:
        """Close our end. The reader ends when the last child that holds the pipe has."""
        self.release()
        if self._reader is not None:
            self._reader.join(timeout=1.0)

    def text(self) -> str:
        """The last of it in one line, as far as it has come through."""
        return " ".join(b"".join(self._kept).decode("utf-8", "replace").split())[-KEPT_CHARS:]

    def _read(self, end: int) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(end, _CHUNK):
                self._kept.append(chunk)
        os.close(end)
