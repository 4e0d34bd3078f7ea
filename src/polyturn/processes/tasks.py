"""Background tasks under supervision: none is left unawaited, and the first failure is raised where they were started."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from polyturn.errors import DeadlineError
from polyturn.processes.deadlines import Interrupt

T = TypeVar("T")

_log = logging.getLogger(__name__)

_left: set[asyncio.Task[Any]] = set()
"""Tasks that were given up on, held so that none is collected half-way."""


def leave_behind(task: asyncio.Task[Any]) -> None:
    """Let a task that does not end once cancelled go on alone: nobody waits for it any more, nor does the end of the loop."""
    asyncio.tasks._unregister_task(task)  # how asyncio documents it for tasks of one's own; `asyncio.run` waits for the others
    _left.add(task)
    task.add_done_callback(_forget)


def left_behind() -> list[str]:
    """Tasks that were given up on and have not ended. The process can't end in good order while there are any."""
    return sorted(task.get_name() for task in _left)


def _forget(task: asyncio.Task[Any]) -> None:
    _left.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("%s, which was given up on, failed: %s: %s", task.get_name(), type(error).__name__, error)


class TaskSet:
    """`async with TaskSet("rollouts") as tasks: tasks.start(...)`: the block ends when all of them have.

    A task that fails interrupts the block and cancels the others, and its error, as it is, comes out of the block; later
    errors are logged. An error of the block cancels all tasks. Tasks started with `background=True` don't keep the block
    open: they are cancelled at its end. A cancelled task has `grace_s` to clean up, then DeadlineError names it, and it is left
    behind.
    """

    def __init__(self, what: str, *, grace_s: float = 10.0) -> None:
        self._what = what
        self._grace_s = grace_s
        self._foreground: set[asyncio.Task[Any]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._in_block = False
        self._closing = False

    def start(self, coroutine: Coroutine[Any, Any, T], name: str, *, background: bool = False) -> asyncio.Task[T]:
        """Run `coroutine` under supervision. Raises RuntimeError once the block has ended or a task has failed."""
        if self._failure is not None or self._closing or not (self._in_block or self._foreground):
            coroutine.close()
            raise RuntimeError(f"{name} can't be started: {self._what} are ending")
        task = asyncio.create_task(coroutine, name=name)
        (self._background if background else self._foreground).add(task)
        task.add_done_callback(self._on_done)
        return task

    async def __aenter__(self) -> TaskSet:
        self._interrupt = Interrupt()
        self._in_block = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_block = False
        failed_first = self._failure is not None
        cancelled = isinstance(error, asyncio.CancelledError)
        interrupted = self._interrupt.settle(error) and cancelled
        stuck: str | None = None
        try:
            while error is None and self._foreground and self._failure is None:
                await asyncio.wait(self._foreground | self._background, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stuck = await self._end()
        if error is not None and not interrupted and (cancelled or not failed_first):
            return
        if self._failure is not None:
            raise self._failure
        if stuck:
            raise DeadlineError(stuck)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._foreground.discard(task)
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if self._failure is not None:
            _log.warning("%s failed too: %s: %s", task.get_name(), type(error).__name__, error)
            return
        self._failure = error
        for other in self._foreground | self._background:
            other.cancel()
        if self._in_block:
            self._interrupt.fire()

    async def _end(self) -> str | None:
        """Cancel whatever still runs and wait for it; a sentence about tasks that don't end, which is logged too."""
        self._closing = True
        running = self._foreground | self._background
        for task in running:
            task.cancel()
        _, left = await asyncio.wait(running, timeout=self._grace_s) if running else (set(), set())
        if not left:
            return None
        for task in left:
            leave_behind(task)
        names = ", ".join(sorted(task.get_name() for task in left))
        stuck = f"waited {self._grace_s:g} s for {names} of {self._what} to end after being cancelled, and they did not"
        _log.warning(stuck)
        return stuck
