"""The published two-segment method: credit of the turn rewards up to the first tool result, outcome credit after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyturn.advantages.base import GroupAdvantages, PerTurn, credit_groups, normalised, outcome, require_weight
from polyturn.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MtGrpo:
    """A = A^O + coef x A^T up to the first tool result, A^O after it; without any tool result A of (R^T + R^O).

    A^X = (X - mean) / (std + 1e-4) over the siblings; R^T sums the turn rewards, R^O is the outcome. "Up to the first tool
    result" are the turns up to and including the first one whose reply holds a message of role `tool`. Kept as published,
    for comparison: it knows two segments, whatever the number of turns.
    Paper: Zeng et al. 2025, "Reinforcing Multi-Turn Reasoning in LLM Agents", arXiv 2505.11821v1.
    """

    turn_advantage_coef: float = 1.0
    """Weight of the turn rewards' credit in the first segment."""

    def __post_init__(self) -> None:
        require_weight("turn_advantage_coef", self.turn_advantage_coef)

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[GroupAdvantages]:
        """Credit of every group; see `Estimator`."""
        return credit_groups(groups, self._credit)

    def _credit(self, siblings: Sequence[Trajectory]) -> list[PerTurn]:
        turn_rewards_G = np.array([sum(trajectory.turn_rewards) for trajectory in siblings], dtype=np.float64)
        outcomes_G = np.array([outcome(trajectory) for trajectory in siblings], dtype=np.float64)
        turn_credit_G = normalised(turn_rewards_G)
        outcome_credit_G = normalised(outcomes_G)
        merged_credit_G = normalised(turn_rewards_G + outcomes_G)
        credit = []
        for i, trajectory in enumerate(siblings):
            first_result = _first_tool_result(trajectory)
            if first_result is None:
                credit.append(np.full(len(trajectory.turns), merged_credit_G[i]))
                continue
            in_first_segment_K = np.arange(len(trajectory.turns)) <= first_result
            credit.append(outcome_credit_G[i] + self.turn_advantage_coef * turn_credit_G[i] * in_first_segment_K)
        return credit


def _first_tool_result(trajectory: Trajectory) -> int | None:
    """Index of the first turn that a tool answered, None when no tool ever did."""
    answered = (k for k, turn in enumerate(trajectory.turns) if any(message.role == "tool" for message in turn.reply))
    return next(answered, None)
