"""Held-out episodes: success, reward per component, turns, tokens, pass@k, each with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polyturn.config.schema import Recipe
from polyturn.engine.base import Engine
from polyturn.environments.base import Environment
from polyturn.errors import ConfigError, TooManyDroppedError
from polyturn.loop.step import exceeds, player_for
from polyturn.loop.tasks import held_out_tasks, load_tasks, tasks_from_file
from polyturn.rendering.renderer import Renderer
from polyturn.rollouts.driver import rollout_groups
from polyturn.types import Task, TaskSource, Trajectory, TrajectoryGroup

Z95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found. `pass_at` maps k to the chance that one of k attempts succeeds."""

    mode: str
    episodes: int
    attempts: int
    faults: int
    success: Estimate
    reward: Estimate
    components: Mapping[str, Estimate]
    turns: Estimate
    tokens: Estimate
    pass_at: Mapping[int, Estimate]
    end_reasons: Mapping[str, float]
    counts: Mapping[str, float]

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """Flat numbers for the metrics file; greedy ones are named so."""
        where = prefix if self.mode == "sampled" else f"{prefix}_{self.mode}"
        flat = {
            "success": self.success.mean,
            "success_low": self.success.low,
            "success_high": self.success.high,
            "reward": self.reward.mean,
            "turns_per_trajectory": self.turns.mean,
            "completion_tokens_per_trajectory": self.tokens.mean,
            "num_faults": float(self.faults),
            **{f"outcome/{name}": estimate.mean for name, estimate in self.components.items()},
            **{f"pass@{k}": estimate.mean for k, estimate in self.pass_at.items()},
            **{f"end/{reason}": share for reason, share in self.end_reasons.items()},
            **{f"environment/{name}": value for name, value in self.counts.items()},
        }
        return {f"{where}/{name}": value for name, value in flat.items()}


def choose_tasks(
    recipe: Recipe, environment: Environment, *, split: str | None = None, data: str | None = None, episodes: int | None = None
) -> list[Task]:
    """The tasks to evaluate on.

    With `split` all of its tasks, where it has an end; with `data` all rows of that file; with neither, the held-out tasks
    that training evaluates on. `episodes` limits them.

    Raises:
        ConfigError: `split` and `data` together, or `data` with a mix, whose parts each have their own.
        DataError: a file that can't be read, or bad rows in it.
    """
    if data is not None:
        if split is not None or recipe.data.mix:
            other = "--split" if split is not None else "data.mix"
            raise ConfigError(f"--data={data} and {other} both say which tasks to take; give one")
        source: TaskSource = tasks_from_file(data, environment, recipe.data.transform)
    elif split is None:
        return held_out_tasks(recipe, environment, episodes)
    else:
        source = load_tasks(recipe, environment, "train" if split == "train" else "eval")
    count = (recipe.evaluation.episodes if source.size is None else source.size) if episodes is None else episodes
    if split in ("test", "eval"):
        return held_out_tasks(recipe, environment, count)
    return [source[index] for index in range(count if source.size is None else min(count, source.size))]


async def evaluate(
    recipe: Recipe,
    environment: Environment,
    renderer: Renderer,
    engine: Engine,
    tasks: Sequence[Task],
    *,
    mode: str,
    samples_per_task: int = 1,
    record: Callable[[Sequence[TrajectoryGroup]], None] | None = None,
) -> Evaluation:
    """Play held-out `tasks`. The noise depends on task and attempt only, so that two models meet the same luck.

    `record` gets what was played, before anything is made of it.

    Raises:
        TooManyDroppedError: more than `rollout.max_dropped_share` of the attempts were lost to faults.
    """
    attempts = 1 if mode == "greedy" else samples_per_task
    player = player_for(recipe, environment, renderer, engine, f"eval/{mode}", greedy=mode == "greedy")
    groups = await rollout_groups(
        player,
        tasks,
        group_size=attempts,
        concurrency=recipe.rollout.concurrency,
        deterministic=recipe.engine.deterministic,
    )
    if record is not None:
        record(groups)
    return summarise(groups, mode=mode, max_dropped_share=recipe.rollout.max_dropped_share)


def summarise(groups: Sequence[TrajectoryGroup], *, mode: str, max_dropped_share: float = 1.0) -> Evaluation:
    """Numbers of `groups` (one per task). Faults are counted and left out of every mean."""
    everything = [trajectory for group in groups for trajectory in group.trajectories]
    played = [trajectory for trajectory in everything if trajectory.valid]
    lost = len(everything) - len(played)
    if not played or exceeds(lost, max_dropped_share * len(everything)):
        reason = next((t.fault for t in everything if t.fault), "no episodes")
        raise TooManyDroppedError(
            f"{lost} of {len(everything)} evaluation episodes were lost, more than "
            f"rollout.max_dropped_share={max_dropped_share} allows; the first reason: {reason}"
        )
    names = sorted({name for trajectory in played for name in trajectory.outcome})
    known = {name: [value for t in played if (value := t.outcome.get(name)) is not None] for name in names}
    counted = sorted({name for trajectory in played for turn in trajectory.turns for name in turn.counts})
    return Evaluation(
        mode=mode,
        episodes=len(groups),
        attempts=max(len(group.trajectories) for group in groups),
        faults=lost,
        success=_success(groups),
        reward=_mean([trajectory.total_reward for trajectory in played]),
        components={name: _mean(values) for name, values in known.items() if values},
        turns=_mean([len(trajectory.turns) for trajectory in played]),
        tokens=_mean([trajectory.num_completion_tokens for trajectory in played]),
        pass_at=_pass_at(groups),
        end_reasons={
            reason: sum(t.end_reason == reason for t in played) / len(played)
            for reason in sorted({t.end_reason for t in played})
        },
        counts={name: _per_episode(played, name) for name in counted},
    )


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased chance that one of k attempts succeeds, from `successes` of `attempts` (Chen et al. 2021, arXiv 2107.03374)."""
    if attempts - successes < k:
        return 1.0
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def _pass_at(groups: Sequence[TrajectoryGroup]) -> dict[int, Estimate]:
    """pass@1, 2, 4 ... and pass@attempts. Tasks with fewer valid attempts than k are left out of that k."""
    most = max(len(group.trajectories) for group in groups)
    ks = sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
    result = {}
    for k in ks:
        per_task = [pass_at_k(len(g.valid), sum(t.success for t in g.valid), k) for g in groups if len(g.valid) >= k]
        if per_task:
            result[k] = _mean(per_task) if most > 1 else _share([bool(value) for value in per_task])
    return result


def _success(groups: Sequence[TrajectoryGroup]) -> Estimate:
    """Share of attempts that succeed. Several attempts at a task are no independent draws: then the interval is over tasks."""
    per_task = [[trajectory.success for trajectory in group.valid] for group in groups if group.valid]
    if all(len(attempts) == 1 for attempts in per_task):
        return _share([attempts[0] for attempts in per_task])
    return _mean([sum(attempts) / len(attempts) for attempts in per_task])


def _per_episode(played: Sequence[Trajectory], name: str) -> float:
    return sum(turn.counts.get(name, 0.0) for trajectory in played for turn in trajectory.turns) / len(played)


def _share(flags: Sequence[bool]) -> Estimate:
    """A proportion with Wilson's interval, which is right at 0 and 1 too."""
    n, p = len(flags), sum(flags) / len(flags)
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
    # At 0 and 1 the bound is exactly p; rounding would put it a hair beside it.
    return Estimate(mean=p, low=p if p == 0 else max(0.0, centre - half), high=p if p == 1 else min(1.0, centre + half))


def _mean(values: Sequence[float]) -> Estimate:
    """A mean with the normal interval."""
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else 0.0
    half = Z95 * spread / math.sqrt(n)
    return Estimate(mean=mean, low=mean - half, high=mean + half)
