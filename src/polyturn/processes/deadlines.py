"""Waits that end. Whoever waits names what for and how long, and gets a DeadlineError with both.

async with deadline(120, "the engine's reply in turn 2 of lookup/7/0"):
    completion = await engine.generate(...)
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from polyturn.errors import DeadlineError

T = TypeVar("T")

_COUNTS_CANCELLATIONS = hasattr(asyncio.Task, "uncancel")  # from Python 3.11


class Interrupt:
    """One cancellation of the current task that can be told apart from everybody else's.

    `fire` cancels; `settle`, called at the end of the block that is to end, takes it back and says whether it was the only
    one. From Python 3.11 tasks count their cancellations; before, the message of the CancelledError tells them apart.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("deadlines and task sets work inside an asyncio task only")
        self._task = task
        self._before = task.cancelling() if _COUNTS_CANCELLATIONS else 0
        self._message = f"interrupt {id(self):x}"
        self.fired = False

    def fire(self) -> None:
        """Cancel the task, once."""
        if not self.fired:
            self.fired = True
            self._task.cancel(self._message)

    def settle(self, error: BaseException | None) -> bool:
        """Take the cancellation back, given what ended the block. True when it fired and nobody else cancelled."""
        if not self.fired:
            return False
        if _COUNTS_CANCELLATIONS:
            return self._task.uncancel() <= self._before
        return not isinstance(error, asyncio.CancelledError) or error.args == (self._message,)


class deadline:
    """`async with deadline(seconds, what)`: DeadlineError when the block takes longer, and the block is cancelled.

    The block is cancelled where it awaits, so one that never awaits is never cut. An error that it raises while it is being
    cancelled comes through as it is. A cancellation from outside stays a cancellation, and of nested deadlines the one that
    passed is the one that is raised.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._what = what

    async def __aenter__(self) -> None:
        self._interrupt = Interrupt()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, self._seconds), self._interrupt.fire)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._interrupt.settle(error) and (error is None or isinstance(error, asyncio.CancelledError)):
            raise _passed(self._seconds, self._what) from error


def run_with_deadline(call: Callable[[], T], seconds: float, what: str) -> T:
    """Call a function that blocks, in a thread of its own, and give up on it after `seconds`.

    Its result and its exceptions come through. Python can't stop a thread: after a DeadlineError it goes on until it ends by
    itself or the process does, so `call` must not hold what others need.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            results.append(context.run(call))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"waiting for {what}", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if thread.is_alive():
        raise _passed(seconds, what)
    if errors:
        raise errors[0]
    return results[0]


def _passed(seconds: float, what: str) -> DeadlineError:
    return DeadlineError(f"waited {seconds:g} s for {what}, which is its deadline, and it did not come")
