"""How far a request has come: whoever works ticks, whoever waits looks."""

from __future__ import annotations

import contextvars
import time

from polyturn.errors import StorageError

CHUNK_BYTES = 4 * 1024 * 1024
"""Files are read, written and hashed in pieces of this size."""


class Progress:
    """What a request has done so far. Whoever waits looks at it; whoever works calls `tick`."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.last = time.monotonic()
        self.abandoned = False
        """Nobody waits any more: the work should end at its next tick."""

    def tick(self, num_bytes: int) -> None:
        """Note that bytes have moved. Raises StorageError once nobody waits any more."""
        if self.abandoned:
            raise StorageError("nobody waits for this request any more")
        self.num_bytes += num_bytes
        self.last = time.monotonic()


progress: contextvars.ContextVar[Progress | None] = contextvars.ContextVar("progress", default=None)
"""Of the request that this code works for; set by `guard.GuardedStore`."""


def tick(num_bytes: int) -> None:
    """Note for whoever waits that bytes have moved."""
    found = progress.get()
    if found is not None:
        found.tick(num_bytes)
