"""Trains one step on recorded trajectories, without an engine: the same file gives the same loss, to the bit.

    file ─> groups by task ─> credit every turn ─> assemble, filter, pack ─> train

For a step that went wrong, and for comparing estimators and losses on equal data. On a GPU, equal to the bit as far as its
kernels allow.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polyturn.errors import DataError
from polyturn.loop.build import build_trainer, policy_to_train
from polyturn.loop.check import Checked, chat_template
from polyturn.loop.step import BatchReport, build_batches
from polyturn.models.load import export_model
from polyturn.processes.threads import in_thread_within
from polyturn.rollouts.record import read_trajectories
from polyturn.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the step came to: the trainer's metrics, and what was left out of the batch."""

    metrics: dict[str, float]
    report: BatchReport
    num_groups: int


async def replay(checked: Checked, path: Path, *, model: str | None, out: Path | None, say: Callable[[str], None]) -> Replayed:
    """Train the recipe's model (or `model`) one step on the trajectories in `path`; with `out`, export the result there.

    Raises:
        DataError: a line that is no trajectory of this recipe's environment and model (file and line), or nothing to train.
        NonFiniteError: the loss or its gradient is nan or inf.
    """
    recipe = checked.recipe
    recorded = list(read_trajectories(path))
    if not recorded:
        raise DataError(f"{path} holds no trajectories; give a file that `polyturn rollout` or a run wrote")
    for line, trajectory in enumerate(recorded, 1):
        problem = broken(trajectory)
        if problem is not None:
            raise DataError(f"{path}:{line}: {problem}; the file was changed or cut, so record again")
    groups = group_recorded(path, recorded, checked.environment.name)
    async with checked.opened():  # builtin:tiny may have to play demonstrations first
        policy = await policy_to_train(recipe, checked.environment, say, path=model)
    refuse_other_vocabulary(path, recorded, policy.model)
    batches, report = build_batches(recipe, groups, checked.estimator(groups))
    if not batches:
        raise DataError(
            f"{path}: nothing to train in {len(groups)} groups: {report.zero_advantage_groups} with all advantages 0, "
            f"{report.small_groups} with fewer than two valid siblings, {len(report.broken_samples)} broken samples; "
            "record more tasks"
        )
    trainer = build_trainer(recipe, policy.model, exact=policy.exact)
    versions = [version for trajectory in recorded for turn in trajectory.turns for version in turn.policy_versions]
    trainer.version = max(versions, default=0)
    limit_s = recipe.trainer.step_deadline_s
    with _equal_to_the_bit():
        metrics = await in_thread_within(limit_s, "the trainer's step (trainer.step_deadline_s)", trainer.train, batches)
    if out is not None:
        export = partial(export_model, chat_template=chat_template(recipe))
        await in_thread_within(limit_s, f"the export of the model to {out}", export, policy.model, policy.folder, out)
    return Replayed(metrics=metrics, report=report, num_groups=len(groups))


def broken(trajectory: Trajectory) -> str | None:
    """What in a recorded trajectory would train the wrong tokens or fail far away, None when all is well.

    A log-probability that is no number is left to the step, which drops the sample and counts it.
    """
    for index, turn in enumerate(trajectory.turns):
        numbers = (*turn.prompt_ids, *turn.completion_ids, *turn.policy_versions)
        if not all(type(number) is int and number >= 0 for number in numbers):
            return f"in turn {index} a token id or policy version is no whole number of at least 0"
        sampled, lengths = len(turn.completion_ids), (len(turn.engine_logprobs), len(turn.policy_versions))
        if lengths != (sampled, sampled):
            return f"turn {index} has {sampled} sampled tokens, {lengths[0]} log-probabilities and {lengths[1]} versions"
        if not all(isinstance(logprob, float | int) for logprob in turn.engine_logprobs):
            return f"in turn {index} a log-probability is no number"
        if not _is_finite(turn.reward):
            return f"turn {index} has the reward {turn.reward!r}, which is no finite number"
        if index == 0 and turn.continues:
            return "the first turn says that it continues another"
    rewards = [value for value in (trajectory.outcome_reward, *trajectory.outcome.values()) if value is not None]
    if not all(map(_is_finite, rewards)):
        return "a reward of the outcome is no finite number"
    return None


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def group_recorded(path: Path, recorded: list[Trajectory], environment: str) -> list[TrajectoryGroup]:
    """Groups by task in the order of the file, siblings in their own. Raises DataError with the line that doesn't fit."""
    siblings: dict[str, dict[int, Trajectory]] = {}
    for line, trajectory in enumerate(recorded, 1):
        task = trajectory.task
        if task.environment != environment:
            raise DataError(
                f"{path}:{line}: a trajectory of environment {task.environment!r}, and the recipe's is {environment!r}; "
                "replay it with the recipe that it was recorded with"
            )
        group = siblings.setdefault(task.id, {})
        if trajectory.sibling in group:
            raise DataError(
                f"{path}:{line}: sibling {trajectory.sibling} of task {task.id} is there twice; "
                "a file holds one step, so split it, or record again"
            )
        first = next(iter(group.values()), trajectory)
        if first.task != task:
            raise DataError(
                f"{path}:{line}: task {task.id} is not the one of the same id above; trajectories of different tasks can't be "
                "siblings"
            )
        group[trajectory.sibling] = trajectory
    return [
        TrajectoryGroup(task=group[min(group)].task, trajectories=tuple(group[sibling] for sibling in sorted(group)))
        for group in siblings.values()
    ]


def refuse_other_vocabulary(path: Path, recorded: list[Trajectory], model: Any) -> None:
    """Raise DataError with the first line whose token ids the model doesn't have."""
    size = model.get_input_embeddings().num_embeddings
    for line, trajectory in enumerate(recorded, 1):
        largest = max((token for turn in trajectory.turns for token in (*turn.prompt_ids, *turn.completion_ids)), default=0)
        if largest >= size:
            raise DataError(
                f"{path}:{line}: token id {largest} is outside the model's {size}; replay it with the model that it was "
                "recorded with"
            )


@contextmanager
def _equal_to_the_bit() -> Iterator[None]:
    """Kernels that give equal sums each time, where there are any."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
