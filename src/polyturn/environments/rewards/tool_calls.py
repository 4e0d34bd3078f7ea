"""`valid_calls`: the share of turns whose calls the environment could read."""

from __future__ import annotations

from dataclasses import dataclass

from polyturn.environments.rewards.view import TrajectoryView
from polyturn.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidCalls:
    """Turns without any of the `counts` that the environment keeps of calls it could not read or make, among all turns."""

    counts: tuple[str, ...] = ("malformed", "unknown_tool")

    def __call__(self, view: TrajectoryView, task: Task) -> float | None:
        """From 0 to 1; None without a turn."""
        if not view.scored:
            return None
        bad = sum(any(turn.counts.get(name, 0) > 0 for name in self.counts) for turn in view.scored)
        return 1 - bad / len(view.scored)
