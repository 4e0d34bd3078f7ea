"""Writes rows to a file whose name says what it is: JSONL, a JSON array, CSV or Parquet, each also in gzip."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.data.readers import SUFFIXES, Container
from polyturn.data.tables import write_parquet
from polyturn.errors import DataError
from polyturn.processes.whole_file import write_whole


def container_of(path: str | Path) -> Container:
    """What a file is to be, by its name. Raises DataError for a name that says nothing."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes if suffix.lower() != ".gz"]
    found = SUFFIXES.get(suffixes[-1]) if suffixes else None
    if found is None:
        raise DataError(
            f"{path} does not say what it is to be; name it .jsonl, .json, .csv, .tsv or .parquet, with .gz to pack"
        )
    return found


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise DataError for a file that is there already, unless `force`."""
    if path.exists() and not force:
        raise DataError(f"{path} exists already; name another file, or give --force")


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]], *, force: bool = False) -> None:
    """Write `rows`. The file appears whole or not at all.

    Raises:
        DataError: the file is there already (unless `force`), its folder is not, or its name does not say what it is.
        MissingDependencyError: a Parquet file without pyarrow.
    """
    target, container = Path(path), container_of(path)
    refuse_existing(target, force=force)
    if not target.parent.is_dir():
        raise DataError(f"{path}: the folder {target.parent} does not exist; make it first")
    memory = io.BytesIO()
    if container == "parquet":
        write_parquet(str(path), memory, rows)
    else:
        text = {"jsonl": _jsonl, "json": _array, "csv": _csv}[container](rows, target)
        memory.write(text.encode("utf-8"))
    data = memory.getvalue()
    if target.suffix.lower() == ".gz":
        data = gzip.compress(data, mtime=0)
    write_whole(target, data)


def _jsonl(rows: Iterable[Mapping[str, Any]], target: Path) -> str:
    return "".join(f"{_json(row, target)}\n" for row in rows)


def _array(rows: Sequence[Mapping[str, Any]], target: Path) -> str:
    return "[\n" + ",\n".join(_json(row, target) for row in rows) + "\n]\n"


def _csv(rows: Sequence[Mapping[str, Any]], target: Path) -> str:
    """Columns in the order in which fields first come up; lists and objects are cells that hold JSON."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t" if ".tsv" in target.suffixes else ",", lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        cells = [row.get(name) for name in names]
        writer.writerow(["" if cell is None else cell if isinstance(cell, str) else _json(cell, target) for cell in cells])
    return text.getvalue()


def _json(value: Any, target: Path) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{target}: a row can't be written as JSON ({error}); give text, numbers, lists and objects") from error
