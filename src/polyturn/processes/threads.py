"""Runs a blocking call in a daemon thread of its own: one that never returns keeps neither the loop nor the exit waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Await `function(*arguments)` run in a new daemon thread. Cancelling the wait leaves the thread to itself.

    The default executor of asyncio is no choice here: its threads are joined at exit, and a handful of calls that hang
    would use it up.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

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
            result = function(*arguments)
        except StopIteration as caught:  # a future can't hold one
            error = RuntimeError(f"StopIteration: {caught}")
        except BaseException as caught:
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=f"call {getattr(function, '__name__', function)}", daemon=True).start()
    return await future
