"""Records of CSV and Parquet files."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from polyturn.data.records import JSON_CELLS, Record, wrong_bytes
from polyturn.errors import MissingDependencyError

_LONGEST_CELL = 2**31 - 1


def csv_records(numbered: Iterator[tuple[int, bytes]], *, tabs: bool, notes: list[str]) -> Iterator[Record]:
    """Rows of a CSV file by the names in its first line. A blank line is a record without row and without problem.

    Lists (`tests`, `tags`, `messages`) are cells that hold JSON.
    """
    csv.field_size_limit(_LONGEST_CELL)
    lines = _Lines(numbered)
    first = next(lines, None)
    if first is None:
        return
    delimiter = "\t" if tabs else _delimiter(first)
    if delimiter != ",":
        notes.append(f"cells are cut at {delimiter!r}")
    reader = csv.reader(_after(first, lines), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            reason = "a quote is opened and never closed" if "unexpected end" in str(error) else str(error)
            yield Record(line=start, problem=f"not valid CSV: {reason}")
            if header is None:
                return
            continue
        if cells is None:
            return
        bad = next((lines.bad[number] for number in range(start, reader.line_num + 1) if number in lines.bad), None)
        if bad:
            yield Record(line=start, problem=bad)
        elif header is None:
            header = [name.strip() for name in cells]
            problem = _header_problem(header)
            if problem:
                yield Record(line=start, problem=problem)
                return
        elif not any(cell.strip() for cell in cells):
            yield Record(line=start)
        else:
            yield _csv_row(header, cells, start)


def parquet_records(file: IO[bytes], path: str, notes: list[str]) -> Iterator[Record]:
    """Rows of a Parquet file; a row's number takes the place of the line.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{path} is a Parquet file, which the package pyarrow reads; pip install 'polyturn[parquet]'"
        ) from error
    number = 0
    try:
        opened = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(file.read()))
        twice = [name for name, count in Counter(opened.schema_arrow.names).items() if count > 1]
        if twice:
            yield Record(line=0, problem=f"the column {twice[0]!r} is there twice; rename one")
            return
        for batch in opened.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield Record(line=number, row=row)
    except (pyarrow.ArrowException, OSError) as error:
        yield Record(line=number + 1, problem=f"broken Parquet data ({' '.join(str(error).split())}); write the file again")
    notes.append("Parquet has no lines: the numbers are those of the rows")


def write_parquet(path: str, file: IO[bytes], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a Parquet file. Raises MissingDependencyError without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{path} is to be a Parquet file, which the package pyarrow writes; pip install 'polyturn[parquet]'"
        ) from error
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)


class _Lines:
    """Lines as text, with a sentence in `bad` for every one that is not UTF-8."""

    def __init__(self, numbered: Iterator[tuple[int, bytes]]) -> None:
        self._numbered = numbered
        self.bad: dict[int, str] = {}

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, raw = next(self._numbered)
        try:
            return raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            self.bad[number] = wrong_bytes(raw, error)
            return raw.decode("utf-8", errors="replace")


def _after(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _delimiter(header: str) -> str:
    """The mark that the names in the first line are cut at; a comma unless another stands there more often."""
    return max(",;\t", key=lambda mark: (header.count(mark), mark == ","))


def _header_problem(header: Sequence[str]) -> str | None:
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        return f"the column {twice[0]!r} is there twice; rename one"
    if not all(header):
        return f"column {header.index('') + 1} has no name; the first line must name every column"
    return None


def _csv_row(header: Sequence[str], cells: Sequence[str], line: int) -> Record:
    if len(cells) != len(header):
        return Record(
            line=line, problem=f"{len(cells)} cells, and the first line names {len(header)}; quote a cell with commas"
        )
    row: dict[str, Any] = dict(zip(header, cells, strict=True))
    for name in JSON_CELLS & row.keys():
        if row[name].lstrip()[:1] in ("[", "{"):
            try:
                row[name] = json.loads(row[name])
            except (ValueError, RecursionError) as error:
                return Record(line=line, problem=f"{name!r} starts like a list and is not valid JSON ({error})")
    return Record(line=line, row=row)
