"""Short ways to make what the loop's parts eat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyturn.advantages.base import GroupAdvantages
from polyturn.config.resolve import resolve
from polyturn.config.schema import Recipe
from polyturn.types import EndReason, Message, Task, Trajectory, TrajectoryGroup, Turn


def make_recipe(**sections: Mapping[str, Any]) -> Recipe:
    """A resolved recipe of two steps; `make_recipe(rollout={"group_size": 4})` replaces settings."""
    whole: dict[str, Any] = {
        "run": {"steps": 2},
        "model": {"path": "builtin:tiny"},
        "environment": {"id": "parts.environments:Colours"},
        "rollout": {"group_size": 4, "max_turns": 3, "max_turn_tokens": 4, "max_trajectory_tokens": 32},
        "trainer": {"row_tokens": 32},
    }
    for name, values in sections.items():
        whole[name] = whole.get(name, {}) | values
    return resolve(Recipe.model_validate(whole), num_train_tasks=None).recipe


def make_task(name: str = "0") -> Task:
    return Task(id=f"task/{name}", environment="colours", messages=(Message(role="user", content="say red"),), answer="red")


def make_turn(
    index: int = 0,
    *,
    reward: float = 0.0,
    prompt: int = 3,
    sampled: int = 2,
    logprob: float = -0.5,
    counts: Mapping[str, float] | None = None,
) -> Turn:
    return Turn(
        continues=index > 0,
        prompt_ids=tuple(range(3, 3 + prompt)),
        completion_ids=tuple(range(10, 10 + sampled)),
        engine_logprobs=(logprob,) * sampled,
        policy_versions=(0,) * sampled,
        stop_reason="stop",
        text="red",
        reward=reward,
        counts=counts or {},
    )


def make_trajectory(
    sibling: int = 0,
    *,
    task: Task | None = None,
    turns: int | Sequence[Turn] = 1,
    outcome: float | None = 0.0,
    success: bool = False,
    fault: str | None = None,
    end: EndReason = "done",
) -> Trajectory:
    made = tuple(make_turn(index) for index in range(turns)) if isinstance(turns, int) else tuple(turns)
    return Trajectory(
        task=task or make_task(),
        sibling=sibling,
        turns=made,
        end_reason="fault" if fault else end,
        outcome={} if outcome is None or fault else {"answer": outcome},
        outcome_reward=None if fault else outcome,
        success=success,
        fault=fault,
    )


def make_group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(task=trajectories[0].task, trajectories=trajectories)


def successes(*flags: bool | None, name: str = "0") -> TrajectoryGroup:
    """Attempts at one task; None is a fault."""
    task = make_task(name)
    return make_group(
        *(
            make_trajectory(i, task=task, fault="lost")
            if flag is None
            else make_trajectory(i, task=task, success=flag, outcome=float(flag))
            for i, flag in enumerate(flags)
        )
    )


def make_credit(group: TrajectoryGroup, *values: float | None) -> GroupAdvantages:
    """The same advantage on every turn of a sibling; None where a sibling has none."""
    return GroupAdvantages(
        per_turn=tuple(
            None if value is None else np.full(len(trajectory.turns), value, dtype=np.float64)
            for value, trajectory in zip(values, group.trajectories, strict=True)
        )
    )
