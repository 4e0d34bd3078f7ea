"""Where a push is, and how long it has been where."""

from __future__ import annotations

import time


class Phases:
    """The phases of one push after the other. `at` ends one and begins the next."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """What each phase of the last push took, also of one that failed."""
        self.now = ""
        """The phase that is under way, empty between pushes."""
        self._since = 0.0

    def begin(self) -> None:
        """A push begins; what the last one took is forgotten."""
        self.seconds, self.now = {}, ""

    def at(self, phase: str) -> None:
        """`phase` begins; empty: the push is over."""
        now = time.perf_counter()
        if self.now:
            self.seconds[self.now] = self.seconds.get(self.now, 0.0) + now - self._since
        self.now, self._since = phase, now
