"""Reward components normalised apart, then summed: the `normalise_then_sum` option of `grpo`.

Paper: Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization", arXiv 2601.05242.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from polyturn.advantages.base import MIN_SIBLINGS, STD_EPSILON, PerSibling, Rewards, centred, normalised
from polyturn.errors import ConfigError, nearest
from polyturn.types import Trajectory

TURN_REWARDS = "turn_rewards"
"""Name of the summed turn rewards among the components."""


def normalised_apart(
    siblings: Sequence[Sequence[Trajectory]], *, rewards: Rewards, weights: Mapping[str, float]
) -> list[PerSibling]:
    """q_i = sum over components of w_c (X_ic - mean_c) / (std_c + 1e-4), then normalised over all trajectories of the step.

    A component counts 0 for a trajectory that lacks it. Without `weights` all weigh 1; with them, a component that has none
    raises ConfigError, because a misspelt name would otherwise go unnoticed.
    """
    combined = [np.zeros(len(group)) for group in siblings]
    for name in _component_names((trajectory for group in siblings for trajectory in group), rewards):
        if weights and name not in weights:
            raise ConfigError(
                f"algorithm.advantage_options.weights has no weight for the component {name!r}; "
                f"name every component ({nearest(name, weights)})"
            )
        for q_G, group in zip(combined, siblings, strict=True):
            q_G += weights.get(name, 1.0) * _normalised_component(group, name)
    # No mean to subtract: every component adds up to 0 within its group, so q does too.
    divisor = std(np.concatenate([np.empty(0), *combined])) + STD_EPSILON
    return [q_G / divisor for q_G in combined]


def std(values: PerSibling) -> float:
    """Sample std (n - 1); 0 for no values at all. One value alone can't be: a group of one is dropped."""
    return float(centred(values).std(ddof=1)) if len(values) else 0.0


def _component_names(trajectories: Iterable[Trajectory], rewards: Rewards) -> list[str]:
    names = {name for trajectory in trajectories for name in trajectory.outcome}
    return sorted(names | {TURN_REWARDS} if rewards == "total" else names)


def _normalised_component(group: Sequence[Trajectory], name: str) -> PerSibling:
    """One component of every sibling normalised within the group, `[G]`; 0 where it is missing or has nothing to compare."""
    values_G = np.array([_component(trajectory, name) for trajectory in group], dtype=np.float64)
    present_G = ~np.isnan(values_G)
    credit_G = np.zeros(len(group))
    if present_G.sum() >= MIN_SIBLINGS:
        credit_G[present_G] = normalised(values_G[present_G])
    return credit_G


def _component(trajectory: Trajectory, name: str) -> float:
    """A named reward of one trajectory, nan when it has none."""
    value = sum(trajectory.turn_rewards) if name == TURN_REWARDS else trajectory.outcome.get(name)
    return float("nan") if value is None else value
