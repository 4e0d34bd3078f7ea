"""The arrows of a training step: tasks -> groups -> credit -> batches. `loop.sync` calls them in order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyturn.advantages.base import MIN_SIBLINGS, GroupAdvantages
from polyturn.config.schema import Recipe, filled
from polyturn.engine.base import Engine
from polyturn.environments.base import Environment
from polyturn.errors import ConfigError, SampleError, TooManyDroppedError, nearest
from polyturn.loop.parts import component_weights
from polyturn.rendering.renderer import Renderer
from polyturn.rollouts.driver import rollout_groups
from polyturn.rollouts.episode import Limits, Player, Sampling
from polyturn.trajectories.assemble import assemble
from polyturn.trajectories.pack import pack
from polyturn.trajectories.sharing import Sharing
from polyturn.types import Task, TrainBatch, TrainSample, Trajectory, TrajectoryGroup

_log = logging.getLogger(__name__)


def player_for(
    recipe: Recipe, environment: Environment, renderer: Renderer, engine: Engine, seed_key: str, *, greedy: bool = False
) -> Player:
    """What all trajectories of a step share. `seed_key` names the step within the run."""
    rollout = recipe.rollout
    return Player(
        environment=environment,
        renderer=renderer,
        engine=engine,
        limits=Limits(
            max_turns=rollout.max_turns,
            max_turn_tokens=rollout.max_turn_tokens,
            max_trajectory_tokens=rollout.max_trajectory_tokens,
            tool_deadline_s=rollout.tool_deadline_s,
            turn_deadline_s=rollout.turn_deadline_s,
            trajectory_deadline_s=rollout.trajectory_deadline_s,
        ),
        sampling=Sampling(
            temperature=0.0 if greedy else rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p
        ),
        reward_weights=component_weights(recipe),
        seed_key=f"{recipe.run.seed}/{seed_key}",
    )


async def make_groups(
    recipe: Recipe, player: Player, tasks: Sequence[Task], on_done: Callable[[Trajectory], None] | None = None
) -> list[TrajectoryGroup]:
    """Roll out `group_size` trajectories of each task."""
    return await rollout_groups(
        player,
        tasks,
        group_size=recipe.rollout.group_size,
        concurrency=recipe.rollout.concurrency,
        deterministic=recipe.engine.deterministic,
        on_done=on_done,
    )


def refuse_unknown_weights(recipe: Recipe, groups: Sequence[TrajectoryGroup]) -> None:
    """Raise ConfigError for a name in `environment.reward_weights` that no trajectory of `groups` was scored on.

    A misspelt name would leave its component at a weight of 1. A component that sometimes can't be told is there all the same,
    as None. Parts of a mix need not all come up in one step, so there a warning must do.
    """
    valid = [trajectory for group in groups for trajectory in group.valid]
    known = {name for trajectory in valid for full in trajectory.outcome for name in (full, full.partition("/")[0])}
    unknown = sorted(set(recipe.environment.reward_weights) - known) if known else []
    if not unknown:
        return
    sentence = (
        f"environment.reward_weights has {', '.join(unknown)}, on which no trajectory of the first step was scored; "
        f"{nearest(unknown[0], known)}"
    )
    if not recipe.data.mix:
        raise ConfigError(sentence)
    _log.warning(sentence)


@dataclass(slots=True)
class BatchReport:
    """What became of a step's trajectories on their way to the batch."""

    planned: int = 0
    faults: list[str] = field(default_factory=list)
    broken_samples: list[str] = field(default_factory=list)
    small_groups: int = 0
    zero_advantage_groups: int = 0
    masked_truncated: int = 0

    @property
    def dropped(self) -> int:
        """Trajectories lost for a reason that was not the model's."""
        return len(self.faults) + len(self.broken_samples)


def build_batches(
    recipe: Recipe,
    groups: Sequence[TrajectoryGroup],
    credit: Sequence[GroupAdvantages],
    sharing: Sharing | None = None,
) -> tuple[list[TrainBatch], BatchReport]:
    """Samples of all groups, packed, one batch per optimizer step (cut by whole groups).

    Left out, and counted: faults, groups with fewer than two valid siblings, groups whose advantages are all zero,
    trajectories that a limit ended when the recipe masks them, broken samples. `sharing` is the trainer's.
    """
    report = BatchReport(planned=sum(len(group.trajectories) for group in groups))
    per_group = [_group_samples(recipe, group, advantages, report) for group, advantages in zip(groups, credit, strict=True)]
    batches = []
    for chunk in np.array_split(np.arange(len(groups)), recipe.trainer.optimizer_steps_per_batch):
        samples = [sample for index in chunk for sample in per_group[index]]
        planned = sum(len(groups[index].trajectories) for index in chunk)
        if samples:
            row_tokens = filled(recipe.trainer.row_tokens)
            batches.append(pack(samples, row_tokens=row_tokens, planned_trajectories=planned, sharing=sharing))
    return batches, report


def _group_samples(recipe: Recipe, group: TrajectoryGroup, credit: GroupAdvantages, report: BatchReport) -> list[TrainSample]:
    report.faults.extend(f"{t.id}: {t.fault or 'no reward'}" for t in group.trajectories if not t.valid)
    if len(group.valid) < MIN_SIBLINGS:
        report.small_groups += 1
        return []
    if credit.is_zero:
        report.zero_advantage_groups += 1
        return []
    samples: list[TrainSample] = []
    for trajectory, advantages in zip(group.trajectories, credit.per_turn, strict=True):
        if advantages is None:
            continue
        if recipe.rollout.mask_truncated and trajectory.truncated:
            report.masked_truncated += 1
            continue
        try:
            made = assemble(trajectory, advantages.tolist(), temperature=recipe.rollout.temperature)
            for sample in made:
                if len(sample) > filled(recipe.trainer.row_tokens):
                    raise SampleError(
                        f"{trajectory.id}: {len(sample)} tokens do not fit trainer.row_tokens={recipe.trainer.row_tokens}"
                    )
        except SampleError as error:
            report.broken_samples.append(str(error))
        else:
            samples.extend(made)
    return samples


def exceeds(lost: int, allowed: float) -> bool:
    """Whether more was lost than allowed; a share of a count that should be whole comes out a hair beside it."""
    return lost > allowed + 1e-6


class DropGuard:
    """Ends a run that loses more than the recipe's share of its trajectories over the recipe's window of steps."""

    def __init__(self, max_share: float, window_steps: int) -> None:
        self._max_share = max_share
        self._steps: deque[tuple[int, int]] = deque(maxlen=window_steps)
        self._window = window_steps

    def state(self) -> list[tuple[int, int]]:
        """What it remembers: trajectories lost and planned, a pair for each of the last steps."""
        return list(self._steps)

    def go_on_from(self, steps: Sequence[Sequence[int]]) -> None:
        """Remember what another one did."""
        self._steps.extend((lost, planned) for lost, planned in steps)

    def check(self, report: BatchReport) -> None:
        """Count a step.

        Raises:
            TooManyDroppedError: the whole step was lost, or the window has lost more than its share. Steps still to come
                in the window count as whole, so that one bad step at the start does not end a run.
        """
        self._steps.append((report.dropped, report.planned))
        lost, planned = (sum(column) for column in zip(*self._steps, strict=True))
        allowed = self._max_share * planned * self._window / len(self._steps)
        if report.dropped == report.planned or exceeds(lost, allowed):
            reason = (report.faults + report.broken_samples)[-1]
            raise TooManyDroppedError(
                f"{lost} of {planned} trajectories of the last {len(self._steps)} steps were lost, more than "
                f"rollout.max_dropped_share={self._max_share} over {self._window} steps allows; the last reason: {reason}"
            )
