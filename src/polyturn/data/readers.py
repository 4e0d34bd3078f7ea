"""Reads a user's file record by record, whatever container it is: JSONL, a JSON array, CSV, Parquet, each also in gzip.

A record that can't be used is one `Record` with its reason and its line; reading goes on behind it. Only what is wrong with
the file as a whole (it is not there, it is a folder) is raised.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast

from polyturn.data.json_text import BadJson, JsonReader, kind_word
from polyturn.data.records import Record, place, wrong_bytes
from polyturn.data.tables import csv_records, parquet_records
from polyturn.errors import DataError

Container = Literal["jsonl", "json", "csv", "parquet"]
SHOWN = {"jsonl": "JSONL", "json": "JSON array", "csv": "CSV", "parquet": "Parquet"}
SUFFIXES: dict[str, Container] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class RowFile:
    """The records of one file. After iterating, `blank_lines` and `notes` say what was passed over or understood.

    Raises:
        DataError: the file is missing, a folder, or of no known kind.
        MissingDependencyError: a Parquet file without pyarrow.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.blank_lines = 0
        self.notes: list[str] = []
        file = Path(path)
        if file.is_dir():
            raise DataError(f"{path} is a folder; give a file in it")
        if not file.is_file():
            raise DataError(f"{path} does not exist; give a JSONL, JSON, CSV or Parquet file")
        self._file = file
        with file.open("rb") as raw:
            start = raw.read(4)
        self.gzipped = start[:2] == b"\x1f\x8b"
        self.num_bytes = file.stat().st_size
        try:
            with self._open() as opened:
                start = opened.read(4096)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            start = b""  # said with a line when it is read
        if file.suffix == ".gz" and not self.gzipped and self.num_bytes:
            raise DataError(f"{path} is called .gz and holds no gzip data; rename it, or pack it with gzip")
        self.container = _container(file, start)
        self._start = start

    @property
    def shown(self) -> str:
        """The container in words."""
        return SHOWN[self.container] + (", gzip" if self.gzipped else "")

    def place(self, line: int) -> str:
        """`file:line`."""
        return place(self.path, line)

    def __iter__(self) -> Iterator[Record]:
        self.blank_lines = 0
        self.notes.clear()
        if self._start[:2] in _UTF16 or (self.container != "parquet" and b"\0" in self._start):
            yield Record(line=0, problem="the file is UTF-16 or no text at all; save it as UTF-8")
            return
        if self._start.startswith(_BOM):
            self.notes.append("a byte order mark, passed over")
        some = False
        for record in self._records():
            some = True
            yield record
        if not some:
            yield Record(line=0, problem=self._nothing())

    def _records(self) -> Iterator[Record]:
        line = 0
        try:
            with self._open() as opened:
                if self.container == "parquet":
                    yield from parquet_records(opened, self.path, self.notes)
                    return
                numbered = enumerate(opened, 1)
                read = {"jsonl": self._jsonl, "json": self._array, "csv": self._csv}[self.container]
                for record in read(numbered):
                    line = record.line
                    yield record
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            yield Record(
                line=line + 1, problem=f"broken gzip data ({error}), here or further on; copy the file again, or unpack it"
            )

    def _jsonl(self, numbered: Iterator[tuple[int, bytes]]) -> Iterator[Record]:
        reader, first = JsonReader(), True
        for number, raw in numbered:
            try:
                text = _decoded(raw, number)
            except UnicodeDecodeError as error:
                yield Record(line=number, problem=wrong_bytes(raw, error))
                continue
            stripped = text.strip()
            if not stripped:
                self.blank_lines += 1
                continue
            record, position = _json_line(reader, text, number, cut_off=not raw.endswith(b"\n"))
            if first and record.problem and stripped[0] == "{" and position is not None:
                whole = self._one_value()
                if whole:
                    yield whole
                    return
            first = False
            yield record

    def _one_value(self) -> Record | None:
        """One problem for a file whose first value goes over several lines, instead of one a line."""
        text = self._text()
        if text is None:
            return None
        start = len(text) - len(text.lstrip())
        try:
            value, end = JsonReader().read_at(text, start)
        except BadJson:
            return None
        lines = text.count("\n", start, end) + 1
        if lines == 1:
            return None
        line = text.count("\n", 0, start) + 1
        if text[end:].strip():
            return Record(line=line, problem=f"the first object goes over {lines} lines; write one object a line")
        inside = [name for name, inner in value.items() if isinstance(inner, list)] if isinstance(value, dict) else []
        where = f"; its rows may be under {inside[0]!r}" if inside else ""
        return Record(
            line=line, problem=f"the file is one JSON object over {lines} lines{where}: write one object a line, or an array"
        )

    def _array(self, numbered: Iterator[tuple[int, bytes]]) -> Iterator[Record]:
        """Records of a JSON array; a `.json` file with an object a line is read as JSONL."""
        lines: list[str] = []
        for number, raw in numbered:
            try:
                lines.append(_decoded(raw, number))
            except UnicodeDecodeError as error:
                yield Record(line=number, problem=wrong_bytes(raw, error))
                return
        text = "".join(lines)
        if not text.lstrip().startswith("["):
            self.container = "jsonl"
            yield from self._jsonl(enumerate((line.encode() for line in lines), 1))
            return
        count = 0
        for record in _elements(text):
            count += record.row is not None
            yield record
        self.notes.append(f"one JSON array, {count} rows found in it")

    def _csv(self, numbered: Iterator[tuple[int, bytes]]) -> Iterator[Record]:
        for record in csv_records(numbered, tabs=".tsv" in self._file.suffixes, notes=self.notes):
            if record.row is None and record.problem is None:
                self.blank_lines += 1
            else:
                yield record

    def _open(self) -> IO[bytes]:
        return cast("IO[bytes]", gzip.open(self._file, "rb") if self.gzipped else self._file.open("rb"))

    def _text(self) -> str | None:
        try:
            with self._open() as opened:
                return opened.read().decode("utf-8-sig")
        except UnicodeDecodeError:
            return None

    def _nothing(self) -> str:
        if self.num_bytes == 0:
            return "the file is empty: it holds no rows (0 bytes)"
        blank = self.blank_lines
        return "the file holds no rows" + (f": {blank} blank line{'' if blank == 1 else 's'}" if blank else "")


def _container(file: Path, start: bytes) -> Container:
    """What the file is, by its first bytes, then by its name."""
    if start.startswith(b"PAR1"):
        return "parquet"
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
    named = SUFFIXES.get(suffixes[-1].lower()) if suffixes else None
    text = start.removeprefix(_BOM).lstrip()
    if named in (None, "jsonl") and text.startswith(b"[") and not _list_line(text):
        return "json"
    if named == "parquet" and start:
        raise DataError(f"{file} is called Parquet and is none; rename it after what it is")
    if named is not None:
        return named
    if text.startswith(b"{") or not text:
        return "jsonl"
    raise DataError(f"{file} is of no known kind; name it .jsonl, .json, .csv, .tsv or .parquet, with .gz behind it if packed")


def _list_line(text: bytes) -> bool:
    """Whether the first line is a whole JSON list and more lines follow: a row that is a list, not an array of rows."""
    line, newline, rest = text.partition(b"\n")
    if not newline or not rest.strip():
        return False
    try:
        JsonReader().read(line.decode())
    except (BadJson, UnicodeDecodeError):
        return False
    return True


def _decoded(raw: bytes, number: int) -> str:
    return raw.decode("utf-8-sig" if number == 1 else "utf-8")


def _json_line(reader: JsonReader, text: str, number: int, *, cut_off: bool) -> tuple[Record, int | None]:
    try:
        value = reader.read(text.rstrip("\r\n"), cut_off=cut_off)
    except BadJson as error:
        column = "" if error.position is None or "column" in error.reason else f" (column {error.position + 1})"
        return Record(line=number, problem=f"{error.reason}{column}"), error.position
    return _row(value, number, "the line"), None


def _row(value: Any, line: int, what: str) -> Record:
    if isinstance(value, dict):
        return Record(line=line, row=value)
    return Record(line=line, problem=f"{what} is {kind_word(value)}; an object is needed")


def _elements(text: str) -> Iterator[Record]:
    """The elements of the array that `text` is, each with the line it starts on. Ends at the first that is no JSON."""
    reader = JsonReader()
    position, line, counted = text.index("[") + 1, 1, 0

    def at(place: int) -> int:
        nonlocal line, counted
        line += text.count("\n", counted, place)
        counted = place
        return line

    first = True
    while True:
        position = _skip(text, position)
        mark = text[position : position + 1]
        if mark == "]":
            if text[position + 1 :].strip():
                yield Record(line=at(position), problem="text after the end of the JSON array; remove it")
            return
        if not first:
            if mark != ",":
                reason = "the JSON array never ends; the file looks cut off" if not mark else "a comma is missing before this"
                yield Record(line=at(position), problem=f"not valid JSON: {reason}; the rows from here on are not read")
                return
            position = _skip(text, position + 1)
        start = at(position)
        try:
            value, end = reader.read_at(text, position, cut_off=not text.endswith("\n"))
        except BadJson as error:
            if error.end is None:
                wrong = start + text.count("\n", position, error.position or position)
                yield Record(line=wrong, problem=f"{error.reason}; the rows from here on are not read")
                return
            yield Record(line=start, problem=error.reason)
            end = error.end
        else:
            yield _row(value, start, "this element")
        position, first = end, False


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
