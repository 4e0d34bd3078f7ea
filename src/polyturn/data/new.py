"""A few rows to start a data file from, right in every format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyturn.data.convert import fields_of
from polyturn.data.formats import Format
from polyturn.types import Message, Row

_STARTERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "A bakery sells rolls in bags of 6. How many rolls are in 7 bags?",
        "There are 42 rolls.",
        {"difficulty": "easy", "tags": ("arithmetic",)},
    ),
    (
        "A train leaves at 9:40 and arrives at 12:05. How long does the journey take?",
        "It takes 2 hours and 25 minutes.",
        {
            "difficulty": "medium",
            "tags": ("arithmetic", "time"),
            "follow_up": "And if it leaves 15 minutes late and arrives on time?",
            "follow_up_response": "Then it takes 2 hours and 10 minutes.",
        },
    ),
    (
        "Which of these words is not a fruit: apple, carrot, cherry, plum?",
        "Carrot is not a fruit.",
        {"difficulty": "easy", "tags": ("words",)},
    ),
    (
        "Write a Python function median(numbers) that returns the median of a list of numbers.",
        "```python\ndef median(numbers):\n    ordered = sorted(numbers)\n    middle = len(ordered) // 2\n"
        "    if len(ordered) % 2:\n        return ordered[middle]\n"
        "    return (ordered[middle - 1] + ordered[middle]) / 2\n```",
        {
            "difficulty": "hard",
            "tags": ("code",),
            "tests": ("assert median([3, 1, 2]) == 2", "assert median([4, 1, 3, 2]) == 2.5"),
        },
    ),
)


def starter_rows(form: Format) -> list[Mapping[str, Any]]:
    """A small valid set in a format, with every optional field once or more."""
    rows: list[Mapping[str, Any]] = []
    for number, (question, answer, options) in enumerate(_STARTERS, 1):
        message = Message(role="user", content=question)
        row = Row(where=f"starter:{number}", format=form.name, messages=(message,), answer=answer, **options)
        rows.append(fields_of(row, form))
    return rows
