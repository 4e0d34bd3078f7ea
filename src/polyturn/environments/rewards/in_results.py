"""`answer_in_results`: whether a tool has shown an answer that counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyturn.environments.rewards.answers import holds_answer, normalised
from polyturn.environments.rewards.exact_match import golds_or_refuse
from polyturn.environments.rewards.view import TrajectoryView, TurnView
from polyturn.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerInResults:
    """1 when a tool message holds a gold answer as whole words.

    As a reward of turns it pays the first such turn only, so that asking again earns nothing. Answers in `ignore` stand in
    almost any text; a task with no others gets None, which is no reward at all.
    """

    ignore: tuple[str, ...] = ("yes", "no")

    def __call__(self, view: TrajectoryView, task: Task) -> float | None:
        """Raises DataError for a task without an answer."""
        passed_over = {normalised(word) for word in self.ignore}
        golds = [gold for gold in golds_or_refuse(task, "answer_in_results") if normalised(gold) not in passed_over]
        if not golds:
            return None
        shown = [_shows(turn, golds) for turn in view.turns]
        if view.scope == "turn":
            return float(bool(shown) and shown[-1] and not any(shown[:-1]))
        return float(any(shown))


def _shows(turn: TurnView, golds: Sequence[str]) -> bool:
    return any(holds_answer(result, gold) for result in turn.results for gold in golds)
