"""Reads rows of a user's file or hub data set; what is wrong with one is said with file and line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from polyturn.data.hub import PREFIX, read_hub_rows
from polyturn.errors import DataError


def read_rows(path: str | Path, *, default_split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a JSONL file (`.gz` too), or of `hf:owner/name`, as (`file:line`, row). Blank lines are passed over.

    `default_split` is for a hub data set whose name says none.

    Raises:
        DataError: a missing or empty file, one that is not gzip though it is called so, text that is not UTF-8, a line
            that is not one JSON object, a data set that can't be loaded.
        MissingDependencyError: a hub data set without the package that reads it.
    """
    on_hub = str(path).startswith(PREFIX)
    rows = read_hub_rows(str(path), default_split=default_split) if on_hub else _file_rows(path)
    count = 0
    for where, row in rows:
        count += 1
        yield where, row
    if count == 0:
        raise DataError(f"{path} holds no rows; a JSONL file has one JSON object a line")


def _file_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{path} does not exist; give a JSONL file, or hf:owner/name for a data set on the hub")
    for number, raw in _lines(file):
        where = f"{path}:{number}"
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 (byte {error.start}); save the file as UTF-8") from error
        if text:
            yield where, _row(text, where)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a plain or gzip file with their numbers, from 1."""
    number = 0
    with cast("IO[bytes]", gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")) as lines:
        try:
            for number, raw in enumerate(lines, 1):
                yield number, raw
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{file}:{number + 1}: broken gzip data ({error}); copy the file again, or unpack it") from error


def _row(text: str, where: str) -> dict[str, Any]:
    rule = "one JSON object a line is needed"
    try:
        row = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); {rule}") from error
    except (ValueError, RecursionError) as error:  # nan, a number of thousands of digits, brackets without end
        raise DataError(f"{where}: not JSON ({error}); {rule}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, not a JSON object; {rule}")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number there, write null")
