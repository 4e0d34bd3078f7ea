"""Rows of a user's data, wherever they lie; what is wrong with one is said with file and line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from polyturn.data.hub import PREFIX, read_hub_rows
from polyturn.data.readers import RowFile
from polyturn.data.records import Record
from polyturn.errors import DataError


class RowSource(Protocol):
    """Records to iterate over; afterwards `notes` and `blank_lines` say what was passed over."""

    path: str
    notes: list[str]
    blank_lines: int

    @property
    def shown(self) -> str:
        """What the source is, in words."""

    def place(self, line: int) -> str:
        """`file:line`."""

    def __iter__(self) -> Iterator[Record]: ...


class ListedRows:
    """A `RowSource` of rows that come as (place, row) from elsewhere than a file, numbered from 1."""

    def __init__(self, path: str, shown: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        self.path = path
        self.shown = shown
        self.notes: list[str] = []
        self.blank_lines = 0
        self._rows = rows
        self._places: dict[int, str] = {}

    def place(self, line: int) -> str:
        """The place that came with the row."""
        return self._places.get(line, self.path)

    def __iter__(self) -> Iterator[Record]:
        number = 0
        for number, (where, row) in enumerate(self._rows, 1):
            self._places[number] = where
            yield Record(line=number, row=row)
        if number == 0:
            yield Record(line=0, problem="no rows")


def open_rows(path: str | Path) -> RowSource:
    """The rows of a file, or of a hub data set. Raises DataError when there is no such file."""
    if str(path).startswith(PREFIX):
        return ListedRows(str(path), "a hub data set", read_hub_rows(str(path), default_split="train"))
    return RowFile(path)


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows as (`file:line`, row). Blank lines are passed over.

    Raises:
        DataError: every line that is no row, a line each, once the rows are through; a missing or empty file.
        MissingDependencyError: a Parquet file without pyarrow.
    """
    source = open_rows(path)
    problems = []
    for record in source:
        if record.row is None:
            problems.append(f"{source.place(record.line)}: {record.problem}")
        else:
            yield source.place(record.line), dict(record.row)
    if problems:
        raise DataError("\n".join(problems))
