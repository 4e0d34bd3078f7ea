"""Reads a corpus: a JSONL file, plain or gzip, whose rows are `{"id", "title", "text"}`."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from polyturn.environments.search.base import Passage
from polyturn.errors import DataError

FIELDS = ("id", "title", "text")
_GZIP = b"\x1f\x8b"


def corpus_file(path: str | Path) -> Path:
    """The file that `path` names. Raises DataError when there is none."""
    file = Path(path).expanduser()
    if not file.is_file():
        found = "is a folder" if file.is_dir() else "does not exist"
        raise DataError(f"the corpus {path} {found}; give a .jsonl or .jsonl.gz file whose rows have id, title and text")
    return file


def corpus_digest(file: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with file.open("rb") as raw:
        while part := raw.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def read_corpus(file: Path) -> Iterator[Passage]:
    """Passages one by one, never all at once. Raises DataError as `file:line: reason` at the first bad row."""
    line = 0
    try:
        with _opened(file) as rows:
            for line, raw in enumerate(rows, 1):
                if raw.strip():
                    yield _passage(raw, f"{file}:{line}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file}:{line + 1}: the gzip data is cut off or damaged ({error}); fetch the file again") from error


def _opened(file: Path) -> BinaryIO:
    with file.open("rb") as raw:
        zipped = raw.read(2) == _GZIP
    return cast(BinaryIO, gzip.open(file, "rb")) if zipped else file.open("rb")


def _passage(raw: bytes, where: str) -> Passage:
    try:
        row = json.loads(raw)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 ({error.reason} at byte {error.start + 1}); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); a row is one object with id, title and text") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, not an object; a row has id, title and text")
    for name in FIELDS:
        if name not in row:
            found = ", ".join(sorted(row)) or "no fields"
            raise DataError(f"{where}: the field {name!r} is missing; a row has id, title and text, and this one {found}")
        if not isinstance(row[name], str) or (name == "id" and not row[name]):
            raise DataError(f"{where}: the field {name!r} is {str(row[name])[:40]!r}; it must be a text")
    # Half a surrogate pair can be written in JSON and nowhere else.
    title, text = (row[name].encode("utf-8", "replace").decode() for name in ("title", "text"))
    return Passage(id=row["id"], title=title, text=text)
