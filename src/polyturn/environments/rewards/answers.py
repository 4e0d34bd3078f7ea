"""Answers of question sets: the one a reply gives, those that count, and when two are the same.

The rules are TriviaQA's: case, punctuation, the articles a, an, the, and white space don't matter.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence

from polyturn.environments.rewards.view import TrajectoryView
from polyturn.types import Task

_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}‘’“”´–—…]")  # noqa: RUF001
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalised(text: str) -> str:
    """A text as it is compared.

    >>> normalised("  The Cotswold-Hills, England! ")
    'cotswold hills england'
    """
    plain = _PUNCTUATION.sub(" ", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(_ARTICLE.sub(" ", plain).split())


def same_answer(given: str, expected: str) -> bool:
    """Whether two answers are the same; one that is nothing but articles and marks is compared as it stands."""
    left, right = normalised(given), normalised(expected)
    if not right:
        return bool(expected.strip()) and given.strip().casefold() == expected.strip().casefold()
    return left == right


def gold_answers(task: Task) -> tuple[str, ...]:
    """Every answer that counts: `task.answer` and the lists `aliases` and `answers` of its info."""
    found: list[str] = [] if task.answer is None else [task.answer]
    for name in ("aliases", "answers"):
        more = task.info.get(name)
        if isinstance(more, Sequence) and not isinstance(more, str):
            found += [alias for alias in more if isinstance(alias, str)]
    return tuple(dict.fromkeys(found))


def given_answer(view: TrajectoryView, *, tag: str | None = None, pattern: str | None = None) -> str | None:
    """What the last reply gives as its answer, None without one.

    With `tag` it is what the last `<tag>...</tag>` holds; with `pattern` the first group of its last match; else the whole
    reply, thoughts aside.
    """
    text = view.spoken
    if tag is not None:
        found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, flags=re.DOTALL)
        return found[-1].strip() if found else None
    if pattern is not None:
        matches = list(re.finditer(pattern, text))
        return (matches[-1][1] or "").strip() if matches else None
    return text.strip() or None


def holds_answer(text: str, gold: str) -> bool:
    """Whether an answer stands in a text, as whole words."""
    wanted = normalised(gold)
    return bool(wanted) and f" {wanted} " in f" {normalised(text)} "
