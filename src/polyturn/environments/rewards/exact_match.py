"""`exact_match`: 1 when the answer given is one of those that count, else 0."""

from __future__ import annotations

import re
from dataclasses import dataclass

from polyturn.environments.rewards.answers import given_answer, gold_answers, same_answer
from polyturn.environments.rewards.view import TrajectoryView
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch:
    """Case, punctuation, articles and white space don't matter; aliases count.

    `tag` takes the answer from the last `<tag>...</tag>` of the last reply, `pattern` from the first group of a regular
    expression, and neither takes the whole reply. A reply without an answer scores 0.
    """

    tag: str | None = None
    pattern: str | None = None

    def __post_init__(self) -> None:
        check_pattern(self.pattern, self.tag)

    def __call__(self, view: TrajectoryView, task: Task) -> float:
        """Raises DataError for a task without an answer."""
        golds = golds_or_refuse(task, "exact_match")
        given = given_answer(view, tag=self.tag, pattern=self.pattern)
        return float(given is not None and any(same_answer(given, gold) for gold in golds))


def golds_or_refuse(task: Task, name: str) -> tuple[str, ...]:
    """The answers that count. Raises DataError without any."""
    golds = gold_answers(task)
    if not golds:
        raise DataError(f"task {task.id} has no answer, and the reward {name} compares with it")
    return golds


def check_pattern(pattern: str | None, tag: str | None) -> None:
    """Raise EnvironmentSetupError for a pattern that is no regular expression with a group, or that comes with a tag."""
    if pattern is None:
        return
    if tag is not None:
        raise EnvironmentSetupError(f"tag={tag!r} and pattern={pattern!r} both say where the answer is; give one")
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise EnvironmentSetupError(f"pattern={pattern!r} is no regular expression: {error}; correct it") from error
    if groups == 0:
        raise EnvironmentSetupError(f"pattern={pattern!r} has no group; put the answer in round brackets")
