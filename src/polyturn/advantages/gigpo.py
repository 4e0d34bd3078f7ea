"""Trajectory credit plus credit among the visits of one state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from polyturn.advantages.base import (
    GroupAdvantages,
    PerTurn,
    centred,
    credit_groups,
    credited_rewards,
    require_discount,
    require_weight,
    returns_to_go,
    scores,
)
from polyturn.errors import ConfigError
from polyturn.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GiGpo:
    """A_ik = (S_i - mean S) + w (G_ik - mean of G over all visits of the group with the same `state_key`).

    A state visited once adds nothing. S is turn rewards plus outcome. A turn without a `state_key` raises ConfigError.
    Paper: Feng et al. 2025, "Group-in-Group Policy Optimization", arXiv 2505.10978.
    """

    needs_state_keys: ClassVar[bool] = True
    """Refused before a run starts where the environment names no states."""
    state_weight: float = 1.0
    """w, the weight of the credit among equal states."""
    gamma: float = 0.95
    """Discount per turn of the return that is compared among equal states."""

    def __post_init__(self) -> None:
        require_weight("state_weight", self.state_weight)
        require_discount("gamma", self.gamma)

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[GroupAdvantages]:
        """Credit of every group; see `Estimator`."""
        return credit_groups(groups, self._credit)

    def _credit(self, siblings: Sequence[Trajectory]) -> list[PerTurn]:
        visits: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for i, trajectory in enumerate(siblings):
            for k in range(len(trajectory.turns)):
                visits[_state_key(trajectory, k)].append((i, k))

        returns = [returns_to_go(credited_rewards(trajectory), self.gamma) for trajectory in siblings]
        state_credit = [np.zeros(len(trajectory.turns)) for trajectory in siblings]
        for places in visits.values():
            credit = centred(np.array([returns[i][k] for i, k in places]))
            for (i, k), value in zip(places, credit, strict=True):
                state_credit[i][k] = value

        trajectory_credit_G = centred(scores(siblings, "total"))
        return [trajectory_credit_G[i] + self.state_weight * state_credit[i] for i in range(len(siblings))]


def _state_key(trajectory: Trajectory, k: int) -> str:
    """The state before turn k, or a ConfigError."""
    key = trajectory.turns[k].state_key
    if key is None:
        raise ConfigError(
            f"algorithm.advantage=gigpo compares equal states, but environment {trajectory.task.environment} gave turn "
            f"{k + 1} of {trajectory.id} no state_key; choose turn_rtg, or an environment that names its states"
        )
    return key
