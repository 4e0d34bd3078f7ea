"""Rows from one built-in format to another. The fields that no format knows go along as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyturn.data.formats import BUILT_IN, BY_NAME, MESSAGES, Format
from polyturn.errors import DataError, nearest
from polyturn.types import Message, Row


def format_named(name: str) -> Format:
    """A format by its name; `instruction_response` is `instruction/response`. Raises DataError for any other."""
    written = name.replace("_", "/")
    if written not in BY_NAME:
        raise DataError(f"--format={name} is no built-in format; {nearest(written, BUILT_IN)}")
    return BY_NAME[written]


def fields_of(row: Row, form: Format) -> dict[str, Any]:
    """The fields of `row` in another format.

    Raises:
        DataError: the row is a conversation that the format has no place for.
    """
    fields: dict[str, Any] = {}
    messages = list(row.messages)
    if form.name == MESSAGES:
        reply = [Message(role="assistant", content=row.answer)] if row.answer is not None else []
        fields[MESSAGES] = [{"role": message.role, "content": message.content} for message in (*messages, *reply)]
    else:
        if messages[0].role == "system":
            fields["system"] = messages.pop(0).content
        if [message.role for message in messages] != ["user"]:
            raise DataError(f"{row.where}: a conversation of several turns does not fit {form.name}; only messages holds it")
        fields[form.prompt] = messages[0].content
        if row.answer is not None:
            fields[form.answer] = row.answer
    options = {
        "aliases": list(row.aliases),
        "tests": list(row.tests),
        "test_cases": [dict(case) for case in row.test_cases],
        "difficulty": row.difficulty,
        "tags": list(row.tags),
        "follow_up": row.follow_up,
        "follow_up_response": row.follow_up_response,
    }
    fields |= {name: value for name, value in options.items() if value not in (None, [])}
    clash = sorted(fields.keys() & row.rest.keys())
    if clash:
        raise DataError(f"{row.where}: the field {clash[0]!r} is there already and {form.name} needs the name; rename it first")
    return fields | dict(row.rest)


def converted(rows: list[Row], form: Format) -> list[Mapping[str, Any]]:
    """All rows in another format. Raises DataError with every row that does not fit, a line each."""
    made: list[Mapping[str, Any]] = []
    problems: list[str] = []
    for row in rows:
        try:
            made.append(fields_of(row, form))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return made
