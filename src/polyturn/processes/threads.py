"""Runs a blocking call in a daemon thread of its own: one that never returns keeps neither the loop nor the exit waiting."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from polyturn.processes.deadlines import deadline

Result = TypeVar("Result")

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Await `function(*arguments)` run in a new daemon thread. Cancelling the wait leaves the thread to itself.

    The default executor of asyncio is no choice here: its threads are joined at exit, and a handful of calls that hang
    would use it up.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: Result | None = None
        error: BaseException | None = None
        try:
            result = context.run(function, *arguments)
        except (StopIteration, asyncio.CancelledError) as caught:
            # A future can't hold the one, and the other would look like a cancellation of whoever waits.
            error = RuntimeError(f"{type(caught).__name__}: {caught}")
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=run, name=f"call {getattr(function, '__name__', function)}", daemon=True)
    _started.add(thread)
    thread.start()
    try:
        return await future
    finally:
        if future.done() and not future.cancelled():
            # It only has to let go of its variables. Were it the last to do so, while the process ends, that would abort it.
            thread.join()


def still_running() -> list[str]:
    """Calls that were given up on and have not come back. The process can't end in good order while there are any."""
    return sorted(thread.name for thread in _started if thread.is_alive())


async def in_thread_within(limit_s: float, what: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """`in_thread` with a deadline. Raises DeadlineError that names `what`; the thread is then left to itself."""
    async with deadline(limit_s, what):
        return await in_thread(function, *arguments)
