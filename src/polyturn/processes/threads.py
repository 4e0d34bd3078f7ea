"""Runs a blocking call in a daemon thread: one that never returns keeps neither loop, nor exit, nor other calls waiting.

    in_thread(call) ──> waiting ──> a thread that takes one call after the other ──> results, told to the loop together
                                    while a call takes long, others get threads of their own

Most calls of a step are thousands of short ones, and to wake a thread for each costs more than the calls do. So one thread
takes them in turn, as long as none holds it up: a call that comes while another has been under way for `QUICK_S` wakes one
more thread, and those that wait behind such a call get a thread each, `LOOK_S` later. Where calls are quick and still too
many, one thread more takes them at each look. Threads that have come back stay for the next calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from polyturn.processes.deadlines import deadline

Result = TypeVar("Result")

IDLE_S = 10.0
"""How long a thread waits for its next call before it ends."""
QUICK_S = 0.001
"""A call that takes longer has its thread for itself."""
LOOK_S = 0.002
"""How often the calls that wait are looked after."""

_waiting: deque[_Call] = deque()
"""Calls that no thread has taken."""
_idle: deque[_Worker] = deque()
_taking: list[_Worker] = []
"""The worker that was woken last, which takes the next calls, or none."""
_under_way: dict[int, str] = {}
"""Names of the calls that wait, or whose thread has not come back."""
_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Await `function(*arguments)`, run in a daemon thread. Cancelling the wait leaves the call to itself.

    The default executor of asyncio is no choice here: its threads are joined at exit, and a handful of calls that hang
    would use it up.
    """
    loop = asyncio.get_running_loop()
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        mailbox = _mailboxes[loop] = _Mailbox()
    future: asyncio.Future[Result] = loop.create_future()
    call = _Call(function, arguments, future, mailbox)
    # Here, not in the thread: on a busy machine the call may be given up on before its thread has come to it.
    _under_way[id(call)] = call.name
    _waiting.append(call)
    # After the call is there for it: a worker that finds none says so first, and then looks once more.
    if not _somebody_is_quick():
        _wake()
    mailbox.look_after(loop)
    del call
    return await future


def still_running() -> list[str]:
    """Calls that were given up on and have not come back. The process can't end in good order while there are any."""
    return sorted(_under_way.copy().values())


async def in_thread_within(limit_s: float, what: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """`in_thread` with a deadline. Raises DeadlineError that names `what`; the thread is then left to itself."""
    async with deadline(limit_s, what):
        return await in_thread(function, *arguments)


def _somebody_is_quick() -> bool:
    return any(worker.is_quick() for worker in tuple(_taking))


def _wake() -> None:
    """Have one more worker take calls."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.began = time.monotonic()
    _taking[:] = [worker]
    worker.wake.put(None)


class _Call:
    """A call on its way through a thread and back.

    Whatever it holds has been let go of by the thread when its result is there. A thread that is the last to let go of a model
    while the process ends would abort it.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], future: asyncio.Future[Any], mailbox: _Mailbox
    ) -> None:
        self.name = f"call {getattr(function, '__name__', function)}"
        self._work: tuple[Callable[..., Any], tuple[Any, ...]] | None = (function, arguments)
        self._context = contextvars.copy_context()
        self._loop = future.get_loop()
        self._mailbox = mailbox
        self.since = time.monotonic()
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
        self._mailbox.put(self, self._loop)

    def settle(self) -> None:
        """In the loop. What the thread still holds of this call is empty from here on."""
        future, result, error = self._future, self._result, self._error
        self._future = self._result = self._error = None
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


class _Mailbox:
    """Results on their way to a loop, which is called once for all that lie there; and its watch over what waits."""

    def __init__(self) -> None:
        self._done: deque[_Call] = deque()
        self._called = False
        self._looking = False

    def put(self, call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        """From a thread."""
        self._done.append(call)
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        self._called = False  # first: what comes from here on calls again
        while self._done:
            self._done.popleft().settle()

    def look_after(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look soon whether calls wait behind one that takes long."""
        if not self._looking:
            self._looking = True
            loop.call_later(LOOK_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looking = False
        try:
            longest_s, count = time.monotonic() - _waiting[0].since, len(_waiting)
        except IndexError:
            return
        more = int(longest_s > LOOK_S) if _somebody_is_quick() else count
        for _ in range(more):
            _wake()
        self.look_after(loop)


class _Worker:
    """A daemon thread that runs one call after the other."""

    def __init__(self) -> None:
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.began = time.monotonic()
        """When it was woken, or took the call that it is at."""
        self.thread = threading.Thread(target=self._run, name="call", daemon=True)
        self.thread.start()

    def is_quick(self) -> bool:
        """Whether it will soon take the next call."""
        return time.monotonic() - self.began < QUICK_S

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            try:
                self.wake.get(timeout=IDLE_S)
            except queue.Empty:
                with contextlib.suppress(ValueError):  # somebody has just woken it: a call waits
                    _idle.remove(self)
                    return
                continue
            while self._takes_one(thread) or self._stays():
                pass

    def _takes_one(self, thread: threading.Thread) -> bool:
        """Run the next call, if there is any."""
        try:
            call = _waiting.popleft()
        except IndexError:
            return False
        self.began = time.monotonic()
        thread.name = call.name
        call.compute()
        thread.name = "call"
        del _under_way[id(call)]
        call.tell()
        return True

    def _stays(self) -> bool:
        """Be idle, unless a call came that nobody was woken for."""
        with contextlib.suppress(ValueError):
            _taking.remove(self)
        _idle.append(self)
        if not _waiting:
            return False
        with contextlib.suppress(ValueError):
            _idle.remove(self)
            return True
        return False  # woken meanwhile


def _forget_threads() -> None:
    """A child of a fork has none of these threads."""
    for known in (_waiting, _idle, _taking, _under_way, _mailboxes):
        known.clear()


os.register_at_fork(after_in_child=_forget_threads)
