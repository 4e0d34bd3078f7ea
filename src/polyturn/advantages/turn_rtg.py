"""Return-to-go of every turn against what the others got from the same turn on: the default estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from polyturn.advantages.base import (
    GroupAdvantages,
    PerTurn,
    credit_groups,
    credited_rewards,
    require_choice,
    require_discount,
    returns_to_go,
)
from polyturn.types import Trajectory, TrajectoryGroup

Baseline: TypeAlias = Literal["survivors", "zero_padded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRtg:
    """A_ik = G_ik - b_ik, with G_ik = sum over l >= k of gamma^(l-k) rho_il, the outcome counted in the last turn.

    `survivors`: b_ik is the mean of G_jk over the siblings j != i that reached turn k; when none did, it is the mean of G_j1
    over j != i minus what i had already earned before turn k. `zero_padded`: b_ik is the mean over all j != i, a sibling
    that did not reach turn k counting as 0.

    Either baseline is a function of the other siblings, and of i before turn k, never of what i did at turn k. That keeps
    the gradient unbiased for any number of turns, also when the policy decides when to stop (with gamma 1; a discount
    biases every estimator). Normalising each turn over the rollouts that reached it, and summing forward, does not: the
    number of baselines it subtracts depends on the rollout's own decision to stop.
    """

    gamma: float = 1.0
    """Discount per turn."""
    baseline: Baseline = "survivors"
    """Whom a turn is compared with; `survivors` is the less noisy one for late turns, and in groups of 8 or more."""

    def __post_init__(self) -> None:
        require_discount("gamma", self.gamma)
        require_choice("baseline", self.baseline, get_args(Baseline))

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[GroupAdvantages]:
        """Credit of every group; see `Estimator`."""
        return credit_groups(groups, self._credit)

    def _credit(self, siblings: Sequence[Trajectory]) -> list[PerTurn]:
        num_siblings, max_turns = len(siblings), max(len(trajectory.turns) for trajectory in siblings)
        returns_GK = np.zeros((num_siblings, max_turns))
        earned_GK = np.zeros((num_siblings, max_turns))
        reached_GK = np.zeros((num_siblings, max_turns), dtype=bool)
        for i, trajectory in enumerate(siblings):
            rewards_K = credited_rewards(trajectory)
            num_turns = len(rewards_K)
            returns_GK[i, :num_turns] = returns_to_go(rewards_K, self.gamma)
            earned_GK[i, 1:num_turns] = np.cumsum(rewards_K)[:-1]
            reached_GK[i, :num_turns] = True

        credit = []
        for i, trajectory in enumerate(siblings):
            others = np.arange(num_siblings) != i
            # Differences are averaged, not baselines subtracted, so that equal returns give exactly 0.
            gaps_JK = returns_GK[i] - returns_GK[others]
            if self.baseline == "zero_padded":
                credit_K = gaps_JK.mean(axis=0)
            else:
                compared_JK = reached_GK[others]
                count_K = compared_JK.sum(axis=0)
                alone_K = (returns_GK[i] + earned_GK[i] - returns_GK[others, :1]).mean(axis=0)
                survivors_K = np.where(compared_JK, gaps_JK, 0.0).sum(axis=0) / np.maximum(count_K, 1)
                credit_K = np.where(count_K > 0, survivors_K, alone_K)
            credit.append(credit_K[: len(trajectory.turns)])
        return credit
