"""Reads rows of a user's file; what is wrong with one is said with file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyturn.errors import DataError


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a JSONL file as (`file:line`, row). Blank lines are passed over.

    Raises:
        DataError: a missing or empty file, text that is not UTF-8, a line that is not one JSON object.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{path} does not exist; give a JSONL file")
    number = count = 0
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 (byte {error.start}); save the file as UTF-8") from error
            if not text:
                continue
            count += 1
            yield where, _row(text, where)
    if count == 0:
        raise DataError(f"{path} holds no rows; a JSONL file has one JSON object a line")


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
