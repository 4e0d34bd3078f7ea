"""`length_penalty`: 0 up to a length, then falling to -1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyturn.environments.rewards.view import TrajectoryView
from polyturn.errors import EnvironmentSetupError
from polyturn.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPenalty:
    """0 for replies of at most `free`, -1 from `limit` on, straight between; of a trajectory, all replies together.

    `unit` is `tokens` or `characters`.
    """

    free: int
    limit: int
    unit: Literal["tokens", "characters"] = "tokens"

    def __post_init__(self) -> None:
        if not 0 <= self.free < self.limit:
            raise EnvironmentSetupError(f"free={self.free} limit={self.limit}: free must be 0 or more, and less than limit")
        if self.unit not in ("tokens", "characters"):
            raise EnvironmentSetupError(f"unit={self.unit!r} is neither tokens nor characters; give one of them")

    def __call__(self, view: TrajectoryView, task: Task) -> float:
        """From -1 to 0."""
        size = sum(turn.num_tokens if self.unit == "tokens" else len(turn.text) for turn in view.scored)
        return -min(1.0, max(0.0, (size - self.free) / (self.limit - self.free)))
