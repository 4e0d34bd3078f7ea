"""A lock on a file, which is free again when the last process that holds it has ended, however that was."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from polyturn.errors import ResourceError

_LOOK_S = 0.05


class FileLock:
    """`with FileLock(path, ...) as lock:`; a child that is given `lock.descriptor` holds it too.

    Raises ResourceError that says `what` is in use, when it is not free within `wait_s`.
    """

    def __init__(self, path: Path, what: str, *, wait_s: float) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(self.descriptor)
                    raise ResourceError(
                        f"{what} is in use by another process, still after {wait_s:g} s; wait until that has ended, or end it"
                    ) from None
            time.sleep(_LOOK_S)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it. Safe to call twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
