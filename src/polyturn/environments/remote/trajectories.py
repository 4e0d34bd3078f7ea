"""The trajectories of one connection, as an environment process plays them: a state each, and one call at a time each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from polyturn.environments.base import Environment
from polyturn.environments.calls import call, checked_outcome, checked_step
from polyturn.environments.remote import wire
from polyturn.environments.remote.wire import MOST_OPEN, Document, Request
from polyturn.errors import ResourceError
from polyturn.processes.deadlines import deadline

Waiting: TypeAlias = Callable[[str], contextlib.AbstractContextManager[None]]
"""Notes a wait for the length of a block, as `Heartbeat.waiting` does."""

_log = logging.getLogger(__name__)


def unnoted(what: str) -> contextlib.AbstractContextManager[None]:
    """A wait that is noted nowhere."""
    return contextlib.nullcontext()


@dataclass(slots=True)
class _Open:
    """A trajectory that was set up. `turn` is held by whoever plays it, so that a close waits for a step that is ending."""

    state: Any
    task_id: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Trajectories:
    """Plays requests on `environment`. Handles are the ids of the setups that opened them."""

    def __init__(self, environment: Environment, waiting: Waiting) -> None:
        self._environment = environment
        self._waiting = waiting
        self._open: dict[int, _Open] = {}
        self._setting_up = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, handle: int) -> bool:
        return handle in self._open

    async def perform(self, request: Request) -> Document | int | None:
        """Do what is asked, and return its value as JSON: a setup's is the handle, a close's is None.

        Raises whatever the environment raises, EnvironmentSetupError for an answer that is none, and ResourceError for a
        handle that isn't open or one trajectory too many.
        """
        if request.op == "setup":
            return await self._setup(request)
        trajectory = self._opened(request.handle)
        async with trajectory.turn:
            self._opened(request.handle)  # another request may have closed it meanwhile
            if request.op == "close":
                del self._open[request.handle]
                await self._ask("close", trajectory.task_id, trajectory.state)
                return None
            if request.op == "step":
                result = await self._ask("step", trajectory.task_id, trajectory.state, request.reply)
                return wire.from_step(checked_step(result, f"{self._environment.name}.step"))
            outcome = await self._ask("rewards", trajectory.task_id, trajectory.state)
            return dict(checked_outcome(outcome, f"{self._environment.name}.rewards"))

    async def close_all(self, limit_s: float) -> None:
        """Close whatever is still open, at once, each within `limit_s`. What goes wrong is logged."""
        left, self._open = list(self._open.values()), {}
        await asyncio.gather(*(self._close(trajectory, limit_s) for trajectory in left))

    async def _setup(self, request: Request) -> int:
        assert request.task is not None, "a setup has a task"
        if len(self._open) + self._setting_up >= MOST_OPEN:
            raise ResourceError(
                f"{MOST_OPEN:,} trajectories are open here, which is the limit of a process; lower rollout.concurrency"
            )
        self._setting_up += 1
        try:
            state = await self._ask("setup", request.task.id, request.task)
        finally:
            self._setting_up -= 1
        self._open[request.id] = _Open(state, request.task.id)
        return request.id

    async def _ask(self, what: str, task_id: str, *arguments: Any) -> Any:
        with self._waiting(f"{self._environment.name}.{what} of {task_id}"):
            return await call(getattr(self._environment, what), *arguments)

    async def _close(self, trajectory: _Open, limit_s: float) -> None:
        what = f"{self._environment.name}.close of {trajectory.task_id}"
        try:
            async with deadline(limit_s, what):
                await self._ask("close", trajectory.task_id, trajectory.state)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            _log.warning("%s, whose driver is gone, failed: %s: %s", what, type(error).__name__, error)

    def _opened(self, handle: int) -> _Open:
        if handle not in self._open:
            raise ResourceError(f"there is no open trajectory {handle} here")
        return self._open[handle]
