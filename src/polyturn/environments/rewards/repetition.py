"""`repetition_penalty`: how much of what was said had been said before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from polyturn.environments.rewards.view import TrajectoryView
from polyturn.errors import EnvironmentSetupError
from polyturn.types import Task

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionPenalty:
    """Minus the share of runs of `words` words that had come before, in this reply or an earlier one.

    Up to a share of `free` there is no penalty; above it the rest is stretched to reach -1.
    """

    words: int = 4
    free: float = 0.0

    def __post_init__(self) -> None:
        if self.words < 1:
            raise EnvironmentSetupError(f"words={self.words} is no length of a run; give 1 or more, 4 is usual")
        if not 0 <= self.free < 1:
            raise EnvironmentSetupError(f"free={self.free} is no share; give 0 to 0.9")

    def __call__(self, view: TrajectoryView, task: Task) -> float:
        """From -1 to 0; 0 for replies too short to hold a run."""
        seen = {run for turn in view.turns[: len(view.turns) - len(view.scored)] for run in self._runs(turn.text)}
        total = again = 0
        for turn in view.scored:
            for run in self._runs(turn.text):
                total += 1
                again += run in seen
                seen.add(run)
        share = again / total if total else 0.0
        return -max(0.0, (share - self.free) / (1 - self.free))

    def _runs(self, text: str) -> Iterator[tuple[str, ...]]:
        words = _WORD.findall(text.casefold())
        return (tuple(words[start : start + self.words]) for start in range(len(words) - self.words + 1))
