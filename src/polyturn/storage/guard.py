"""A store whose every request ends within its deadline, and that is left alone for a while after it failed."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from polyturn.errors import DeadlineError, StorageError
from polyturn.storage.breaker import Breaker
from polyturn.storage.progress import Progress, progress
from polyturn.storage.stores.base import Entry, MissingKeyError, Store

T = TypeVar("T")


class HungError(StorageError, DeadlineError):
    """A request of a store passed its deadline."""


STALL_S = 10.0
"""A request that moves no byte for this long has hung."""
SLOWEST_BYTES_PER_S = 1e6
"""Slower than this over a whole file is as good as hung."""
_LOOK_S = 0.05


class GuardedStore:
    """A store behind a deadline and a breaker. `store` is the one behind it.

    A request that moves nothing for `stall_s`, or takes longer than that and its bytes at `slowest_bytes_per_s`, is given up:
    DeadlineError. Python can't stop its thread, which ends at its next tick, or with the process.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        stall_s: float = STALL_S,
        slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S,
        breaker: Breaker | None = None,
    ) -> None:
        self.store = store
        self.name = name
        self.breaker = breaker or Breaker(f"the tier {name}")
        self._stall_s = stall_s
        self._slowest_bytes_per_s = slowest_bytes_per_s

    @property
    def url(self) -> str:
        """Of the store behind."""
        return self.store.url

    def put(self, file: Path, key: str, *, link: bool = False) -> None:
        """Store a local file."""
        self._ask(lambda: self.store.put(file, key, link=link), f"storing {key}")

    def get(self, key: str, file: Path, *, link: bool = False) -> None:
        """Fetch a file."""
        self._ask(lambda: self.store.get(key, file, link=link), f"fetching {key}")

    def read(self, key: str) -> bytes:
        """Content of a small file."""
        return self._ask(lambda: self.store.read(key), f"reading {key}")

    def chunks(self, key: str) -> Iterator[bytes]:
        """Content in pieces, each within the deadline."""
        pieces = self._ask(lambda: iter(self.store.chunks(key)), f"reading {key}")
        while (piece := self._ask(lambda: next(pieces, None), f"reading {key}")) is not None:
            yield piece

    def list(self, prefix: str) -> list[Entry]:
        """Files by prefix."""
        return self._ask(lambda: self.store.list(prefix), f"listing {prefix}")

    def delete(self, key: str) -> None:
        """Remove a file."""
        self._ask(lambda: self.store.delete(key), f"deleting {key}")

    def exists(self, key: str) -> bool:
        """Whether it is there."""
        return self._ask(lambda: self.store.exists(key), f"looking for {key}")

    def put_if_absent(self, content: bytes, key: str) -> bool:
        """Store a small file where there is none."""
        return self._ask(lambda: self.store.put_if_absent(content, key), f"storing {key}")

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Remove what dead writers left."""
        return self._ask(lambda: self.store.sweep(prefix, older_than_s), f"sweeping {prefix}")

    def ask(self, call: Callable[[], T], what: str, *, stall_s: float) -> T:
        """What `call` returns, which asks the place behind this store by another way and may move nothing for `stall_s`."""
        return self._ask(call, what, stall_s)

    def _ask(self, call: Callable[[], T], what: str, stall_s: float | None = None) -> T:
        self.breaker.enter()
        try:
            result = self._within(call, what, self._stall_s if stall_s is None else stall_s)
        except MissingKeyError:
            self.breaker.succeeded()
            raise
        except BaseException as error:
            self.breaker.failed(str(error), hung=isinstance(error, DeadlineError))
            raise
        self.breaker.succeeded()
        return result

    def _within(self, call: Callable[[], T], what: str, stall_s: float) -> T:
        """Run in a thread of its own and watch its progress; the outer request's clock goes on ticking with it."""
        outer, inner = progress.get(), Progress()
        outcome: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            progress.set(inner)
            try:
                outcome.append(call())
            except BaseException as error:
                errors.append(error)

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(work,), name=f"{self.name}: {what}", daemon=True)
        began = time.monotonic()
        thread.start()
        try:
            while thread.is_alive():
                thread.join(min(_LOOK_S, stall_s / 4))
                if outer is not None:
                    outer.tick(0)
                if thread.is_alive():
                    self._refuse_hung(inner, began, what, stall_s)
        except BaseException:
            inner.abandoned = True
            raise
        if errors:
            raise errors[0]
        return outcome[0]

    def _refuse_hung(self, inner: Progress, began: float, what: str, stall_s: float) -> None:
        now = time.monotonic()
        stalled, taken = now - inner.last, now - began
        allowed = stall_s + inner.num_bytes / self._slowest_bytes_per_s
        if stalled > stall_s:
            why = f"moved nothing for {stall_s:g} s"
        elif taken > allowed:
            why = f"moved {inner.num_bytes:,} bytes in {taken:.0f} s, less than {self._slowest_bytes_per_s:,.0f} a second"
        else:
            return
        raise HungError(f"the tier {self.name} ({self.url}): {what} {why}, which is its deadline")


def guarded(store: Store, name: str, *, stall_s: float = STALL_S) -> GuardedStore:
    """The store behind a guard; one that has a guard already is left as it is."""
    return store if isinstance(store, GuardedStore) else GuardedStore(store, name, stall_s=stall_s)
