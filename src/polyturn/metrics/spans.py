"""How long the parts of a step take.

with spans.span("rollout"):
    ...
metrics |= spans.take()          # {"time/rollout_s": 1.25}
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Clock:
    seconds: float = 0.0
    num_open: int = 0
    since: float = 0.0


class Spans:
    """Adds up, for each name, the seconds during which at least one span of that name was open.

    Spans of one name that overlap, as those of concurrent rollouts do, count once, so no part of a step is ever longer than
    the step. Threads and asyncio tasks may share one object. `clock` is for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._clocks: dict[str, _Clock] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the time of the block under `time/<name>_s`, also when it raises."""
        with self._lock:
            clock = self._clocks.setdefault(name, _Clock())
            if clock.num_open == 0:
                clock.since = self._clock()
            clock.num_open += 1
        try:
            yield
        finally:
            with self._lock:
                clock.num_open -= 1
                if clock.num_open == 0:
                    clock.seconds += self._clock() - clock.since

    def take(self) -> dict[str, float]:
        """The seconds since the last call, as metrics; spans still open count up to now and go on."""
        with self._lock:
            now = self._clock()
            taken = {}
            for name, clock in self._clocks.items():
                if clock.num_open:
                    clock.seconds += now - clock.since
                    clock.since = now
                taken[f"time/{name}_s"] = clock.seconds
                clock.seconds = 0.0
            return taken
