"""Work for one tier that others must not wait for: one thing at a time, the newest of those that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Lane(Generic[T]):
    """A thread that does `work` with one thing after the other. While it is busy one more waits; a newer one replaces that."""

    def __init__(self, name: str, work: Callable[[T], None]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, thing: T) -> list[T]:
        """Let `thing` be next. What has waited in its place, and is dropped for it."""
        with self._changed:
            dropped, self._waiting = self._waiting, [thing]
            self._changed.notify_all()
        return dropped

    def close(self) -> None:
        """Finish what there is, and wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                thing = self._waiting.pop()
            self._work(thing)
