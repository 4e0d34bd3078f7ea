"""Runs a blocking call in a daemon thread: one that never returns keeps neither loop, nor exit, nor other calls waiting.

A thread that has come back takes the next call, so that a step with thousands of short ones doesn't start thousands of threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from polyturn.processes.deadlines import deadline

Result = TypeVar("Result")

IDLE_S = 10.0
"""How long a thread waits for its next call before it ends."""

_idle: deque[_Worker] = deque()
_busy: dict[int, str] = {}
"""Names of the calls that a worker has, or will have as soon as its thread looks."""


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Await `function(*arguments)`, run in a daemon thread. Cancelling the wait leaves the thread to itself.

    The default executor of asyncio is no choice here: its threads are joined at exit, and a handful of calls that hang
    would use it up.
    """
    future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    call = _Call(function, arguments, future)
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    # Here, not in the thread: on a busy machine the call may be given up on before its thread has come to it.
    _busy[id(worker)] = call.name
    worker.inbox.put(call)
    return await future


def still_running() -> list[str]:
    """Calls that were given up on and have not come back. The process can't end in good order while there are any."""
    return sorted(_busy.values())


async def in_thread_within(limit_s: float, what: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """`in_thread` with a deadline. Raises DeadlineError that names `what`; the thread is then left to itself."""
    async with deadline(limit_s, what):
        return await in_thread(function, *arguments)


class _Call:
    """A call on its way through a thread and back.

    Whatever it holds has been let go of by the thread when its result is there. A thread that is the last to let go of a model
    while the process ends would abort it.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        self.name = f"call {getattr(function, '__name__', function)}"
        self._work: tuple[Callable[..., Any], tuple[Any, ...]] | None = (function, arguments)
        self._context = contextvars.copy_context()
        self._loop = future.get_loop()
        self._future: asyncio.Future[Any] | None = future
        self._result: Any = None
        self._error: BaseException | None = None

    def compute(self) -> None:
        """In the thread: run the function."""
        assert self._work is not None, "a call runs once"
        (function, arguments), self._work = self._work, None
        try:
            self._result = self._context.run(function, *arguments)
        except (StopIteration, asyncio.CancelledError) as caught:
            # A future can't hold the one, and the other would look like a cancellation of whoever waits.
            self._error = RuntimeError(f"{type(caught).__name__}: {caught}")
        except BaseException as caught:
            self._error = caught

    def tell(self) -> None:
        """In the thread: let the loop have the result."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        """In the loop. What the thread still holds of this call is empty from here on."""
        future, result, error = self._future, self._result, self._error
        self._future = self._result = self._error = None
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


class _Worker:
    """A daemon thread that runs one call after the other."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="call", daemon=True).start()

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            try:
                call = self.inbox.get(timeout=IDLE_S)
            except queue.Empty:
                with contextlib.suppress(ValueError):  # somebody has just taken it: its call is on the way
                    _idle.remove(self)
                    return
                continue
            thread.name = call.name
            call.compute()
            thread.name = "call"
            del _busy[id(self)]
            _idle.append(self)
            call.tell()
            del call


# A child of a fork has none of these threads.
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_busy.clear)
