"""Score minus the group's mean, not divided by anything."""

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
class DrGrpo:
    """A_i = S_i - mean of S, on every turn.

    Dividing by the group's std weighs easy and hard tasks up against middling ones; this does not.
    Paper: Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv 2503.20783.
    """

    rewards: Rewards = "total"
    """`total`: turn rewards plus outcome; `outcome`: the outcome alone."""

    def __post_init__(self) -> None:
        require_choice("rewards", self.rewards, get_args(Rewards))

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[GroupAdvantages]:
        """Credit of every group; see `Estimator`."""
        return credit_groups(groups, self._credit)

    def _credit(self, siblings: Sequence[Trajectory]) -> list[PerTurn]:
        return on_every_turn(centred(scores(siblings, self.rewards)), siblings)
