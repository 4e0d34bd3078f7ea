"""`f1`: how many words the answer given shares with the nearest answer that counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from polyturn.environments.rewards.answers import given_answer, normalised, same_answer
from polyturn.environments.rewards.exact_match import check_pattern, golds_or_refuse
from polyturn.environments.rewards.view import TrajectoryView
from polyturn.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class F1:
    """Harmonic mean of precision and recall over words, the best over all aliases. `tag` and `pattern` as in exact_match."""

    tag: str | None = None
    pattern: str | None = None

    def __post_init__(self) -> None:
        check_pattern(self.pattern, self.tag)

    def __call__(self, view: TrajectoryView, task: Task) -> float:
        """Raises DataError for a task without an answer."""
        given = given_answer(view, tag=self.tag, pattern=self.pattern)
        golds = golds_or_refuse(task, "f1")
        return 0.0 if given is None else max(word_f1(given, gold) for gold in golds)


def word_f1(given: str, expected: str) -> float:
    """F1 of two answers.

    >>> word_f1("the Cotswold Hills", "Cotswolds Hills")
    0.5
    """
    left, right = normalised(given).split(), normalised(expected).split()
    if not left or not right:
        return float(same_answer(given, expected))
    common = sum((Counter(left) & Counter(right)).values())
    return 2 * common / (len(left) + len(right))
