"""Ctrl-C and SIGTERM: the first one ends the run in good order, with its model saved; the second one ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def until_signal(work: Coroutine[Any, Any, Any]) -> None:
    """Await `work` until it ends or either signal asks it to; it is cancelled then, and its clean-up waited for."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    asked = False

    def cancel() -> None:
        nonlocal asked
        asked = True
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, cancel)
    try:
        await task
    except asyncio.CancelledError:
        if not asked:
            raise
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


class StopRequested(Exception):
    """A signal asked the run to end. It never leaves the loop."""


class Stopping:
    """`async with Stopping(say) as stopping:` takes over both signals for the length of the block.

    `requested` is the name of the signal that came, None before. Work that may be thrown away runs through `unless`; a
    training step and a push are never cut, so what is saved is the policy after a whole step.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._event = asyncio.Event()
        self._taken: list[signal.Signals] = []
        self._lost: BaseException | None = None
        self.requested: str | None = None

    async def __aenter__(self) -> Stopping:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            # Only the main thread may; a run in another one is stopped by whoever started it.
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self.request, number)
                self._taken.append(number)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._taken:
            asyncio.get_running_loop().remove_signal_handler(number)
        self._taken.clear()

    def request(self, number: signal.Signals) -> None:
        """What a signal does."""
        if self.requested is not None:
            print(f"polyturn: {number.name} again: ended at once", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self.requested = number.name
        self._say(f"{number.name}: the run ends after saving its model; once more ends it at once")
        self._event.set()

    def lose(self, error: BaseException) -> None:
        """What `work` counts on is gone: `unless` raises `error` from now on. From the event loop's own thread."""
        self._lost = error
        self._event.set()

    def lose_from_thread(self) -> Callable[[BaseException], None]:
        """`lose` for whoever notices in another thread; made in the event loop's own."""
        loop = asyncio.get_running_loop()

        def notice(error: BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nothing waits any more
                loop.call_soon_threadsafe(self.lose, error)

        return notice

    async def unless(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`, or cancel it when a stop is asked for or something is lost.

        Raises StopRequested then, or what was lost, and what `work` raises.
        """
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                if self._lost is not None:
                    raise self._lost
                raise StopRequested
            return task.result()
        finally:
            for one in (task, asked):
                one.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)
