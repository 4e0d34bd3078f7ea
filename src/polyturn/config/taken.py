"""A value that another tool's file gives a key of the recipe."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from polyturn.config.yaml_lines import KeyPath, dotted


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One key of the recipe, its value, and where that comes from.

    >>> taken = Taken(key=("trainer", "num_ranks"), value=4, place="accelerate.yaml:9", said="num_processes: 4")
    >>> print(taken)
    accelerate.yaml:9: num_processes: 4 is trainer.num_ranks=4
    """

    key: KeyPath
    value: Any
    place: str
    """File and line."""
    said: str
    """Key and value as they stand there."""
    why: str = ""
    """What is different here, or why it is this key; empty where the two mean the same."""
    implied: bool = False
    """The other tool's default: a recipe that says something else is right."""

    @property
    def assignment(self) -> str:
        """As an override of the command line."""
        return f"{dotted(self.key)}={shown(self.value)}"

    def __str__(self) -> str:
        return f"{self.place}: {self.said} is {self.assignment}{f' ({self.why})' if self.why else ''}"


def shown(value: Any) -> str:
    """A value as a recipe shows it.

    >>> shown(True), shown([0.9, 0.95]), shown("ddp")
    ('true', '[0.9, 0.95]', 'ddp')
    """
    return value if isinstance(value, str) else json.dumps(value)
