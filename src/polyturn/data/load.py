"""A file's rows with the transform behind them: what every use of data begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyturn.data.formats import Format, dominant, row_in
from polyturn.data.rows import RowSource, open_rows
from polyturn.data.transform import Transform
from polyturn.errors import DataError
from polyturn.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Rows by line, and the problems of the lines that are no rows. `dropped` counts what the transform left out."""

    source: RowSource
    rows: tuple[tuple[int, Mapping[str, Any]], ...]
    problems: tuple[tuple[int, str], ...]
    dropped: int = 0

    def place(self, line: int) -> str:
        """`file:line`."""
        return self.source.place(line)

    @property
    def format(self) -> Format | None:
        """The built-in format that most rows are in."""
        return dominant(fields for _, fields in self.rows)

    def formatted(
        self, *, need_answer: bool = True, own: Callable[[Mapping[str, Any]], bool] | None = None
    ) -> Iterator[tuple[int, Row | None, tuple[str, ...]]]:
        """Every row in the words of this project, or the sentences about what is wrong with it; not those that are `own`."""
        fallback = self.format
        for line, fields in self.rows:
            if own is not None and own(fields):
                continue
            row, problems = row_in(fields, self.place(line), fallback, need_answer=need_answer)
            yield line, row, problems

    def fields(self) -> dict[str, tuple[int, int]]:
        """How many rows have each field, and in how many of those it is null, empty or white space."""
        there: Counter[str] = Counter()
        empty: Counter[str] = Counter()
        for _, row in self.rows:
            there.update(row.keys())
            empty.update(name for name, value in row.items() if _is_empty(value))
        return {name: (there[name], empty[name]) for name in there}


def load(path: str, transform: Transform | None = None) -> Loaded:
    """All rows of a file or hub data set, transformed.

    Raises:
        DataError: there is no such file, or none that can be read as a whole. Bad rows are in `Loaded.problems`.
        MissingDependencyError: a container whose package is not installed.
    """
    source = open_rows(path)
    rows: list[tuple[int, Mapping[str, Any]]] = []
    problems: list[tuple[int, str]] = []
    dropped = 0
    for record in source:
        if record.row is None:
            problems.append((record.line, record.problem or "no row"))
            continue
        try:
            row = record.row if transform is None else transform(record.row)
        except DataError as error:
            problems.append((record.line, str(error)))
            continue
        if row is None:
            dropped += 1
        else:
            rows.append((record.line, row))
    if not rows and not problems:
        problems.append((0, f"no rows are left: data.transform dropped all {dropped}"))
    return Loaded(source=source, rows=tuple(rows), problems=tuple(problems), dropped=dropped)


def load_formatted(path: str, transform: Transform | None = None, *, need_answer: bool = True) -> list[Row]:
    """The rows of a file in the words of this project. Raises DataError with every bad row, as `file:line: reason`."""
    loaded = load(path, transform)
    problems = [(line, problem) for line, problem in loaded.problems]
    rows: list[Row] = []
    for line, row, found in loaded.formatted(need_answer=need_answer):
        problems += [(line, problem) for problem in found]
        if row is not None:
            rows.append(row)
    refuse(loaded, problems)
    return rows


def refuse(loaded: Loaded, problems: list[tuple[int, str]]) -> None:
    """Raise DataError with all `problems` in the order of the file; none is fine."""
    if problems:
        ordered = sorted(problems, key=lambda problem: problem[0])
        raise DataError("\n".join(f"{loaded.place(line)}: {reason}" for line, reason in ordered))


def _is_empty(value: object) -> bool:
    return value is None or value in ([], {}) or (isinstance(value, str) and not value.strip())
