"""Single fields of a row: what is wrong with a text, and the optional fields that every format may have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyturn.data.json_text import kind_word
from polyturn.types import Json

_RANKS = {
    word: float(rank)
    for rank, words in enumerate(
        (
            ("trivial", "very easy", "beginner"),
            ("easy", "simple", "introductory", "intro"),
            ("medium", "normal", "moderate", "intermediate", "interview"),
            ("hard", "difficult", "advanced", "competition"),
            ("very hard", "expert", "extreme"),
        )
    )
    for word in words
}
_NUMBERED = re.compile(r"(?:level|lvl|difficulty|grade|stage)?[ _-]*(\d+(?:\.\d+)?)", re.IGNORECASE)
_CASE_OUTPUTS = ("output", "expected", "expected_output")


class Problems:
    """Sentences about a row, in the order in which they were found."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._found: list[tuple[str, str]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, field: str | None, sentence: str | None) -> None:
        """Note a sentence about a field; None is no problem."""
        if sentence is not None:
            self._found.append((field or "", sentence))

    def about(self, *fields: str) -> bool:
        """Whether something is noted about one of these fields."""
        return any(field in fields for field, _ in self._found)

    def sentences(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(sentence for _, sentence in self._found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The optional fields of a row. A field that is null or empty is one that is not there."""

    system: str | None
    tests: tuple[str, ...]
    test_cases: tuple[Mapping[str, Json], ...]
    difficulty: str | float | None
    tags: tuple[str, ...]
    aliases: tuple[str, ...]
    follow_up: str | None
    follow_up_response: str | None


def text_problem(name: str, value: object, *, quote: bool = True) -> str | None:
    """Why a field that must be a text is none; None when it is."""
    shown = f"'{name}'" if quote else name
    if not isinstance(value, str):
        return f"{shown} is {kind_word(value)}; a string is needed"
    if value == "":
        return f"{shown} is an empty string"
    return None if value.strip() else f"{shown} holds only white space"


def difficulty_rank(difficulty: object) -> float | None:
    """A number that orders difficulties, None for a word whose place nobody knows.

    >>> difficulty_rank("easy") < difficulty_rank("Hard"), difficulty_rank("Level 4"), difficulty_rank("purple")
    (True, 4.0, None)
    """
    if isinstance(difficulty, int | float) and not isinstance(difficulty, bool):
        return float(difficulty)
    if not isinstance(difficulty, str):
        return None
    word = " ".join(re.split(r"[\s_-]+", difficulty.strip().lower()))
    match = _NUMBERED.fullmatch(word)
    return float(match[1]) if match else _RANKS.get(word)


def optional_fields(fields: Mapping[str, Any], problems: Problems) -> Options:
    """The optional fields of a row; what is wrong with one is added to `problems`."""
    tests, loose_cases = _tests(fields, problems)
    follow_up = _text(fields, "follow_up", problems)
    response = _text(fields, "follow_up_response", problems)
    if response and not follow_up and not problems.about("follow_up"):
        problems.add("follow_up", "'follow_up_response' is there and 'follow_up', which it answers, is not")
    return Options(
        system=_text(fields, "system", problems),
        tests=tests,
        test_cases=loose_cases,
        difficulty=_difficulty(fields, problems),
        tags=_strings(fields, "tags", problems, split=True),
        aliases=(*_strings(fields, "answers", problems), *_strings(fields, "aliases", problems)),
        follow_up=follow_up,
        follow_up_response=response,
    )


def _text(fields: Mapping[str, Any], name: str, problems: Problems) -> str | None:
    value = fields.get(name)
    if value in (None, ""):
        return None
    reason = text_problem(name, value)
    problems.add(name, reason)
    return None if reason else value


def _strings(fields: Mapping[str, Any], name: str, problems: Problems, *, split: bool = False) -> tuple[str, ...]:
    value = fields.get(name)
    if value in (None, "", []):
        return ()
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip()) if split else (value,)
    if not isinstance(value, list):
        problems.add(name, f"'{name}' is {kind_word(value)}; a list of strings is needed")
        return ()
    for index, item in enumerate(value):
        reason = text_problem(f"{name}[{index}]", item, quote=False)
        problems.add(name, reason)
        if reason:
            return ()
    return tuple(value)


def _difficulty(fields: Mapping[str, Any], problems: Problems) -> str | float | None:
    value = fields.get("difficulty")
    if value in (None, ""):
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        problems.add("difficulty", f"'difficulty' is {kind_word(value)}; a word or a number is needed")
        return None
    return value if isinstance(value, str) else float(value)


def _tests(fields: Mapping[str, Any], problems: Problems) -> tuple[tuple[str, ...], tuple[Mapping[str, Json], ...]]:
    """`tests` are statements; `test_cases` are statements too, or objects with input and output."""
    statements = list(_strings(fields, "tests", problems))
    cases: list[Mapping[str, Json]] = []
    given = fields.get("test_cases")
    if given in (None, "", []):
        return tuple(statements), ()
    if isinstance(given, str):
        return (*statements, given), ()
    if not isinstance(given, list):
        problems.add("test_cases", f"'test_cases' is {kind_word(given)}; a list is needed")
        return (), ()
    for index, case in enumerate(given):
        name = f"test_cases[{index}]"
        if isinstance(case, str) and case.strip():
            statements.append(case)
        elif not isinstance(case, Mapping):
            problems.add("test_cases", f"{name} is {kind_word(case)}; a statement or an object with input and output is needed")
        else:
            output = next((key for key in _CASE_OUTPUTS if key in case), None)
            if "input" not in case or output is None:
                missing = "input" if "input" not in case else "output"
                problems.add("test_cases", f"{name}.{missing} is missing; a test case has input and output")
            else:
                cases.append({"input": case["input"], "output": case[output]})
    return tuple(statements), tuple(cases)
