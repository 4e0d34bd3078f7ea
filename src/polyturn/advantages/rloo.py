"""Score minus the mean score of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from polyturn.advantages.base import (
    GroupAdvantages,
    PerTurn,
    Rewards,
    centred,
    credit_groups,
    on_every_turn,
    require_choice,
    scores,
)
from polyturn.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rloo:
    """A_i = S_i - mean of S_j over j != i, on every turn.

    The baseline doesn't contain the trajectory's own score, so the estimate is unbiased and not merely proportional to an
    unbiased one. Paper: Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740.
    """

    rewards: Rewards = "total"
    """`total`: turn rewards plus outcome; `outcome`: the outcome alone."""

    def __post_init__(self) -> None:
        require_choice("rewards", self.rewards, get_args(Rewards))

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[GroupAdvantages]:
        """Credit of every group; see `Estimator`."""
        return credit_groups(groups, self._credit)

    def _credit(self, siblings: Sequence[Trajectory]) -> list[PerTurn]:
        # S_i - (n mean - S_i) / (n - 1) = (S_i - mean) n / (n - 1)
        num_siblings = len(siblings)
        return on_every_turn(centred(scores(siblings, self.rewards)) * num_siblings / (num_siblings - 1), siblings)
