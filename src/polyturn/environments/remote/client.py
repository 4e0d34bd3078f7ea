"""The driver's side: an environment whose trajectories are played in other processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from polyturn.environments.base import Environment, Reply, StepResult, Vocabulary
from polyturn.environments.remote import wire
from polyturn.environments.remote.link import Link
from polyturn.errors import ConfigError, ResourceError
from polyturn.processes.deadlines import deadline
from polyturn.rendering.tool_calls import ToolSpec
from polyturn.types import Row, Split, Task, TaskSource


@dataclass(frozen=True, slots=True)
class Handle:
    """A trajectory of another process: what a driver has in place of the state, which never leaves it."""

    link: Link
    number: int
    task_id: str


class RemoteEnvironment(Environment):
    """`local`, played by the processes at `urls`, each of which serves an environment built like it.

    What makes or reads tasks is done by `local`, which is never started. A trajectory is set up in the process with the fewest
    open ones, and stays there. All methods belong to the event loop that `start` ran on.

    Raises ConfigError without a URL or a token.
    """

    name = "remote"

    def __init__(
        self,
        local: Environment,
        urls: Sequence[str],
        *,
        token: str,
        connect_deadline_s: float = 30.0,
        silence_s: float = 60.0,
    ) -> None:
        if not urls or not token:
            raise ConfigError("an environment in other processes needs their addresses and the run's token")
        self.local = local
        self.name = local.name  # type: ignore[misc]  # it stands in for the environment it holds
        self.full_marks = local.full_marks  # type: ignore[misc]
        self.names_states = local.names_states  # type: ignore[misc]
        self.reads_formats = local.reads_formats  # type: ignore[misc]
        self.needs_answer = local.needs_answer
        self.scores = local.scores
        self._urls = tuple(urls)
        self._token = token
        self._connect_deadline_s = connect_deadline_s
        self._silence_s = silence_s
        self._session: aiohttp.ClientSession | None = None
        self._links: list[Link] = []

    # ── what the driver's own copy does ────────────────────────────────────────────────────────────────────────────────

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """The environment's own."""
        return self.local.tasks(split, seed)

    def task_from_row(self, row: Mapping[str, Any], task_id: str) -> Task:
        """The environment's own."""
        return self.local.task_from_row(row, task_id)

    def task_from_example(self, row: Row) -> Task:
        """The environment's own."""
        return self.local.task_from_example(row)

    def knows_row(self, fields: Mapping[str, Any]) -> bool:
        """The environment's own."""
        return self.local.knows_row(fields)

    def tool_specs(self, task: Task) -> Sequence[ToolSpec]:
        """The environment's own."""
        return self.local.tool_specs(task)

    def succeeded(self, task: Task, outcome: Mapping[str, float | None]) -> bool:
        """The environment's own."""
        return self.local.succeeded(task, outcome)

    def gold(self, task: Task) -> Sequence[str]:
        """The environment's own."""
        return self.local.gold(task)

    def demonstrations(self, task: Task, rng: random.Random) -> Sequence[str]:
        """The environment's own."""
        return self.local.demonstrations(task, rng)

    def vocabulary(self) -> Vocabulary:
        """The environment's own."""
        return self.local.vocabulary()

    # ── what the processes do ──────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Connect to every process.

        Raises:
            ResourceError: one can't be reached within the deadline.
            ConfigError: one has another token or plays another environment.
        """
        links = [Link(url, self._token, self._silence_s) for url in self._urls]
        self._links, self._session = links, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        session, limit_s = self._session, self._connect_deadline_s

        async def connect(link: Link) -> None:
            async with deadline(limit_s, f"{link.name} to answer"):
                await link.connect(session, self.name)

        for failed in await asyncio.gather(*map(connect, links), return_exceptions=True):
            if isinstance(failed, BaseException):
                await self.stop()
                raise failed

    async def stop(self) -> None:
        """Disconnect from every process, which closes what is still open there."""
        links, session = self._links, self._session
        self._links, self._session = [], None
        await asyncio.gather(*(link.disconnect() for link in links))
        if session is not None:
            await session.close()

    async def setup(self, task: Task) -> Handle:
        """Open `task` in the process with the fewest open trajectories.

        Raises ResourceError when that process dies meanwhile, or all are gone, and EnvironmentSetupError for a task that can't
        be sent. As `step` and `rewards`, it raises whatever the environment does.
        """
        link = self._freest()
        link.num_open += 1
        try:
            number = await link.ask("setup", f"task {task.id}", task=wire.from_task(task))
            if not wire.is_id(number):
                raise ResourceError(f"{link.name} answered a setup without a handle")
        except BaseException:
            link.num_open -= 1
            raise
        return Handle(link, number, task.id)

    async def step(self, state: Handle, reply: Reply) -> StepResult:
        """What the process answers to the reply. Raises ResourceError when it is gone."""
        what = f"a reply of {len(reply.text):,} characters"
        return wire.to_step(await state.link.ask("step", what, handle=state.number, reply=wire.from_reply(reply)))

    async def rewards(self, state: Handle) -> dict[str, float | None]:
        """What the process scores. Raises ResourceError when it is gone."""
        return wire.to_outcome(await state.link.ask("rewards", "a request", handle=state.number))

    async def close(self, state: Handle) -> None:
        """Close it there. Nothing is left to close where the process is gone."""
        try:
            await state.link.ask("close", "a request", handle=state.number)
        except ResourceError:
            if state.link.lost is None:
                raise
        finally:
            state.link.num_open -= 1

    def _freest(self) -> Link:
        """The process with the fewest open trajectories. Raises ResourceError when there is none."""
        alive = [link for link in self._links if link.lost is None]
        if alive:
            return min(alive, key=lambda link: link.num_open)
        lost = [link.lost for link in self._links if link.lost is not None]
        raise ResourceError("; ".join(lost) or f"{self.name} is not started; call start() first")
