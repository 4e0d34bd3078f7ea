"""Waits that end. Whoever waits names what for and how long, and gets a DeadlineError with both.

async with deadline(120, "the engine's reply in turn 2 of lookup/7/0"):
    completion = await engine.generate(...)
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from polyturn.errors import DeadlineError

T = TypeVar("T")

_CLOCK_S = time.get_clock_info("monotonic").resolution
"""A loop calls a timer so much too early."""
_MOST_ROWS = 64
"""Lengths of deadlines, before those that nobody waits for are forgotten."""
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
        self.fired = False

    def fire(self) -> None:
        """Cancel the task, once."""
        if not self.fired:
            self.fired = True
            self._task.cancel(self._message())

    def settle(self, error: BaseException | None) -> bool:
        """Take the cancellation back, given what ended the block. True when it fired and nobody else cancelled."""
        if not self.fired:
            return False
        if _COUNTS_CANCELLATIONS:
            return self._task.uncancel() <= self._before
        return not isinstance(error, asyncio.CancelledError) or error.args == (self._message(),)

    def _message(self) -> str:
        return f"interrupt {id(self):x}"


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
        self._row = _row_of(asyncio.get_running_loop(), max(0.0, self._seconds))
        self._row.add(self._interrupt)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._row.remove(self._interrupt)
        if self._interrupt.settle(error) and (error is None or isinstance(error, asyncio.CancelledError)):
            raise _passed(self._seconds, self._what) from error


class _Row:
    """Interrupts of one length on one loop, which come up in the order in which they began: one timer does for all.

    A step sets thousands of deadlines of a few lengths, nearly none of which passes; a timer for each would cost a tenth of
    the rollout's time in Python.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._ends: dict[Interrupt, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, interrupt: Interrupt) -> None:
        """Fire it in time."""
        end = self._ends[interrupt] = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(end, self._look)

    def remove(self, interrupt: Interrupt) -> None:
        """It came to its end, fired or not. The last one takes the timer along."""
        self._ends.pop(interrupt, None)
        if not self._ends and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Fire those whose time is up, and come back for the next."""
        self._timer = None
        now = self._loop.time() + _CLOCK_S
        while self._ends:
            interrupt, end = next(iter(self._ends.items()))
            if end > now:
                self._timer = self._loop.call_at(end, self._look)
                return
            del self._ends[interrupt]
            interrupt.fire()

    @property
    def empty(self) -> bool:
        return not self._ends


class _Rows(threading.local):
    """The rows of the loop that runs in this thread."""

    loop: asyncio.AbstractEventLoop | None = None
    by_length: dict[float, _Row]


_rows = _Rows()


def _row_of(loop: asyncio.AbstractEventLoop, seconds: float) -> _Row:
    if _rows.loop is not loop:
        _rows.loop, _rows.by_length = loop, {}
    rows = _rows.by_length
    row = rows.get(seconds)
    if row is None:
        if len(rows) >= _MOST_ROWS:  # lengths that are what is left of a longer wait are all different
            for length in [length for length, other in rows.items() if other.empty]:
                del rows[length]
        row = rows[seconds] = _Row(loop, seconds)
    return row


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
