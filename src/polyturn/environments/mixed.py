"""Several environments as one: each task is played by the environment it names."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.environments.base import Environment, Reply, StepResult
from polyturn.environments.calls import call
from polyturn.errors import EnvironmentSetupError
from polyturn.rendering.tool_calls import ToolSpec
from polyturn.types import Split, Task, TaskSource


class Mixed(Environment):
    """`parts` by name. The tasks come from outside, as do their names (`data.mix`)."""

    name = "mixed"

    def __init__(self, parts: Mapping[str, Environment]) -> None:
        self.parts = dict(parts)
        self._started: list[Environment] = []
        self.names_states = all(part.names_states for part in parts.values())  # type: ignore[misc]

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """Raises EnvironmentSetupError: a mix is put together from its parts."""
        raise EnvironmentSetupError("a mix of environments makes no tasks of its own; its parts do")

    def tool_specs(self, task: Task) -> Sequence[ToolSpec]:
        """The tools of the task's environment."""
        return self._part(task).tool_specs(task)

    async def start(self) -> None:
        """Start every part, in order."""
        for part in self.parts.values():
            self._started.append(part)
            await call(part.start)

    async def stop(self) -> None:
        """Stop every part that was started, the last one first; the first error is raised when all have been."""
        errors: list[BaseException] = []
        while self._started:
            try:
                await call(self._started.pop().stop)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _part(self, task: Task) -> Environment:
        if task.environment not in self.parts:
            raise EnvironmentSetupError(f"task {task.id} belongs to {task.environment!r}, which is no part of the mix")
        return self.parts[task.environment]

    async def setup(self, task: Task) -> tuple[Environment, Any]:
        """The environment of the task, and its state. Raises EnvironmentSetupError for a name that is no part."""
        environment = self._part(task)
        return environment, await call(environment.setup, task)

    async def step(self, state: tuple[Environment, Any], reply: Reply) -> StepResult:
        """What the task's environment answers."""
        environment, inner = state
        result: StepResult = await call(environment.step, inner, reply)
        return result

    async def rewards(self, state: tuple[Environment, Any]) -> Mapping[str, float | None]:
        """What the task's environment scores."""
        environment, inner = state
        outcome: Mapping[str, float | None] = await call(environment.rewards, inner)
        return outcome

    def succeeded(self, task: Task, outcome: Mapping[str, float | None]) -> bool:
        """The verdict of the task's environment."""
        return self.parts[task.environment].succeeded(task, outcome)

    async def close(self, state: tuple[Environment, Any]) -> None:
        """Close the task's environment."""
        environment, inner = state
        await call(environment.close, inner)

    def gold(self, task: Task) -> Sequence[str]:
        """The replies of the task's environment."""
        return self.parts[task.environment].gold(task)

    def demonstrations(self, task: Task, rng: random.Random) -> Sequence[str]:
        """The replies of the task's environment."""
        return self.parts[task.environment].demonstrations(task, rng)
