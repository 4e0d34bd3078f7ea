"""One record of a file: its line, and the row in it or what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

JSON_CELLS = frozenset(("messages", "tests", "test_cases", "tags", "answers", "aliases"))
"""Fields that are lists: in a container that holds only text they are written as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A row with the number of its first line, or of its row in a container without lines; the file as a whole is line 0.

    `row` is None where the record can't be used; `problem` then says why.
    """

    line: int
    row: Mapping[str, Any] | None = None
    problem: str | None = None


def place(path: object, line: int) -> str:
    """`file:line`, or the file alone for line 0."""
    return f"{path}:{line}" if line else str(path)


def wrong_bytes(raw: bytes, error: UnicodeDecodeError) -> str:
    """Why a line is not UTF-8, with the first wrong byte and its place in the line."""
    return (
        f"not valid UTF-8: byte 0x{raw[error.start]:02X} at byte {error.start + 1} of the line; "
        "the file may be Latin-1 (Windows-1252), save it as UTF-8"
    )
