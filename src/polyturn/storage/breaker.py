"""A circuit breaker: after failures in a row a place is left alone for a while, then tried again with one request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from polyturn.errors import StorageError


class SkippedError(StorageError):
    """The place failed a moment ago and is not asked again yet."""


class Breaker:
    """Counts failures of one place. Closed: requests pass. Open: they are refused at once, until the pause is over.

    After the pause one request passes as a trial: it closes the breaker, or opens it again for twice as long, up to
    `longest_pause_s`. A request that hung opens it at once, any other failure after `failures` in a row. Safe among threads.
    """

    def __init__(
        self,
        name: str,
        *,
        failures: int = 3,
        pause_s: float = 30.0,
        longest_pause_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._most = failures
        self._first_pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._pause_s = pause_s
        self._open_until: float | None = None
        self._trial = False
        self._reason = ""

    @property
    def is_open(self) -> bool:
        """Whether the next request would be refused."""
        with self._lock:
            return self._open_until is not None and (self._trial or self._clock() < self._open_until)

    def enter(self) -> None:
        """Before a request. Raises SkippedError while the breaker is open."""
        with self._lock:
            if self._open_until is None:
                return
            left = self._open_until - self._clock()
            if left > 0 or self._trial:
                when = f"in {left:.0f} s" if left > 0 else "when the trial that is under way has ended"
                raise SkippedError(f"{self._name} is skipped and tried again {when}: {self._reason}")
            self._trial = True

    def succeeded(self) -> None:
        """After a request that the place answered, with whatever."""
        with self._lock:
            self._count = 0
            self._pause_s = self._first_pause_s
            self._open_until = None
            self._trial = False

    def failed(self, reason: str, *, hung: bool = False) -> None:
        """After a request that the place did not answer, or could not do."""
        with self._lock:
            self._count += 1
            self._reason = reason
            if self._trial:
                self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
            if hung or self._trial or self._count >= self._most:
                self._open_until = self._clock() + self._pause_s
            self._trial = False
