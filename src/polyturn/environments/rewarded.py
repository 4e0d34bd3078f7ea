"""An environment with the recipe's own rewards beside its own: it plays as before, and is scored by both."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polyturn.environments.base import Environment, Reply, StepResult, Vocabulary
from polyturn.environments.calls import call, checked_outcome, checked_step
from polyturn.environments.rewards.base import Reward
from polyturn.environments.rewards.view import TrajectoryView, TurnView
from polyturn.errors import EnvironmentSetupError
from polyturn.rendering.tool_calls import ToolSpec
from polyturn.types import Row, Split, Task, TaskSource


@dataclass(slots=True)
class State:
    """The environment's own state, and what rewards see."""

    inner: Any
    task: Task
    turns: list[TurnView] = field(default_factory=list)
    done: bool = False


class Rewarded(Environment):
    """`inner` with `rewards`.

    A reward of turns is added to the turn's reward, times its weight, and counted as `reward/name`. A reward of trajectories
    is one outcome component or several, weighed where outcomes are. Success stays the environment's own verdict; rewards with
    `success_at` must agree. Where the environment scores nothing itself, they decide, or the first reward from 1 on.
    """

    name = "rewarded"

    def __init__(self, inner: Environment, rewards: Sequence[Reward]) -> None:
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]  # it stands in for the environment it holds
        self.full_marks = inner.full_marks  # type: ignore[misc]
        self.reads_formats = inner.reads_formats  # type: ignore[misc]
        self.names_states = inner.names_states  # type: ignore[misc]
        self.needs_answer = inner.needs_answer
        self._of_turns = [reward for reward in rewards if reward.scope == "turn"]
        self._of_trajectories = [reward for reward in rewards if reward.scope == "trajectory"]
        self.scores = inner.scores or bool(self._of_trajectories)

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """The environment's own."""
        return self.inner.tasks(split, seed)

    def task_from_row(self, row: Mapping[str, Any], task_id: str) -> Task:
        """The environment's own."""
        return self.inner.task_from_row(row, task_id)

    def task_from_example(self, row: Row) -> Task:
        """The environment's own."""
        return self.inner.task_from_example(row)

    def knows_row(self, fields: Mapping[str, Any]) -> bool:
        """The environment's own."""
        return self.inner.knows_row(fields)

    def tool_specs(self, task: Task) -> Sequence[ToolSpec]:
        """The environment's own."""
        return self.inner.tool_specs(task)

    async def start(self) -> None:
        """The environment's own."""
        await call(self.inner.start)

    async def stop(self) -> None:
        """The environment's own."""
        await call(self.inner.stop)

    async def setup(self, task: Task) -> State:
        """The environment's state, and nothing said yet."""
        return State(inner=await call(self.inner.setup, task), task=task)

    async def step(self, state: State, reply: Reply) -> StepResult:
        """The environment's answer, with the rewards of this turn."""
        result = checked_step(await call(self.inner.step, state.inner, reply), f"{self.name}.step")
        turn = TurnView(
            text=reply.text,
            reply=result.messages,
            truncated=reply.truncated,
            num_tokens=reply.num_tokens,
            reward=result.reward,
            counts=result.counts,
        )
        state.turns.append(turn)
        state.done = result.done
        if not self._of_turns:
            return result
        view = TrajectoryView(task=state.task, turns=tuple(state.turns), scope="turn", done=state.done)
        added, counts = 0.0, dict(result.counts)
        for reward in self._of_turns:
            for name, value in (await reward(view)).items():
                if value is not None:
                    added += reward.weight * value
                    counts[f"reward/{name}"] = value
        return replace(result, reward=result.reward + added, counts=counts)

    async def rewards(self, state: State) -> dict[str, float | None]:
        """The environment's components and those of the rewards."""
        outcome = checked_outcome(await call(self.inner.rewards, state.inner), f"{self.name}.rewards")
        view = TrajectoryView(task=state.task, turns=tuple(state.turns), done=state.done)
        for reward in self._of_trajectories:
            if any(reward.owns(name) for name in outcome):
                raise EnvironmentSetupError(
                    f"the reward {reward.name!r} is called like a component of {self.name}; give it another name"
                )
            outcome |= await reward(view)
        return outcome

    def succeeded(self, task: Task, outcome: Mapping[str, float | None]) -> bool:
        """By the environment's own components, and by every reward with `success_at`."""
        given = {reward.name: _total(reward, outcome) for reward in self._of_trajectories}
        own = {name: value for name, value in outcome.items() if not any(r.owns(name) for r in self._of_trajectories)}
        deciding = [(given[r.name], r.success_at) for r in self._of_trajectories if r.success_at is not None]
        if not own and not deciding and self._of_trajectories:
            deciding = [(given[self._of_trajectories[0].name], 1.0)]
        agreed = all(value is not None and value >= least - 1e-6 for value, least in deciding)
        return agreed and (self.inner.succeeded(task, own) if own else bool(deciding))

    async def close(self, state: State) -> None:
        """The environment's own."""
        await call(self.inner.close, state.inner)

    def gold(self, task: Task) -> Sequence[str]:
        """The environment's own."""
        return self.inner.gold(task)

    def demonstrations(self, task: Task, rng: random.Random) -> Sequence[str]:
        """The environment's own."""
        return self.inner.demonstrations(task, rng)

    def vocabulary(self) -> Vocabulary:
        """The environment's own."""
        return self.inner.vocabulary()


def _total(reward: Reward, outcome: Mapping[str, float | None]) -> float | None:
    values = [value for name, value in outcome.items() if reward.owns(name) and value is not None]
    return sum(values) if values else None
