"""Rows of a JSONL file, and one sentence with file and line for whatever is wrong with it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.data.rows import read_rows
from polyturn.errors import DataError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(st.dictionaries(st.text(min_size=1), JSON, max_size=3), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@given(
    rows=ROWS,
    end=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
    ascii_only=st.booleans(),
    last=st.booleans(),
    blank=st.sampled_from(["", " ", "\t"]),
)
def test_whatever_is_written_is_read_with_its_line(folder, rows, end, bom, ascii_only, last, blank):
    path = folder / "data.jsonl"
    lines = [line for row in rows for line in (json.dumps(row, ensure_ascii=ascii_only), blank)]
    text = end.join(lines) + end * last
    path.write_bytes(text.encode("utf-8-sig" if bom else "utf-8", errors="replace"))
    expected = json.loads(json.dumps(rows).encode(errors="replace"))
    assert [row for _, row in read_rows(path)] == expected
    assert [where for where, _ in read_rows(str(path))] == [f"{path}:{2 * index + 1}" for index in range(len(rows))]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1}\n\n{"a": \n', ":3: not valid JSON: it ends too early; a closing brace or bracket is missing (column 7)"),
        (b'{"a": 1}\n[1, 2]\n', ":2: the line is a list; an object is needed"),
        (b'"red"\n', ":1: the line is a string; an object is needed"),
        (b"null\n", ":1: the line is null; an object is needed"),
        (b'{"a": 1} {"b": 2}\n', ":1: two objects on one line; write each on a line of its own (column 10)"),
        (
            b'{"a": 1}\n{"a": "\xff"}\n',
            ":2: not valid UTF-8: byte 0xFF at byte 8 of the line; the file may be Latin-1 (Windows-1252), save it as UTF-8",
        ),
        ('{"a": 1}'.encode("utf-16"), ": the file is UTF-16 or no text at all; save it as UTF-8"),
        (b"", ": the file is empty: it holds no rows (0 bytes)"),
        (b"\xef\xbb\xbf", ": the file holds no rows: 1 blank line"),
        (b"\n \r\n\t\n", ": the file holds no rows: 3 blank lines"),
        (b'{"a": 1}\n\xef\xbb\xbf{"a": 2}\n', ":2: not valid JSON: a byte order mark inside the file; remove it (column 1)"),
        (b'{"a": NaN}\n', ":1: not valid JSON: NaN is no JSON number; write null, or leave the field out"),
        (b'{"a": [-Infinity]}\n', ":1: not valid JSON: -Infinity is no JSON number; write null, or leave the field out"),
        (b'{"a": 1' + b"0" * 5000 + b"}\n", ":1: not valid JSON: a number of thousands of digits; write it as a string"),
        (b'{"a": ' + b"[" * 100_000 + b"\n", ":1: not valid JSON: it is nested too deeply"),
    ],
    ids=[
        "half a line",
        "a list",
        "a text",
        "null",
        "two objects",
        "not UTF-8",
        "UTF-16",
        "empty",
        "a mark and nothing else",
        "blank lines only",
        "a mark inside",
        "nan",
        "infinity",
        "a number without end",
        "nested too deep",
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, content, said):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert str(caught.value) == f"{path}{said}"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="does not exist; give a JSONL, JSON, CSV or Parquet file"):
        list(read_rows(tmp_path / "data.jsonl"))
    with pytest.raises(DataError, match="is a folder; give a file in it"):
        list(read_rows(tmp_path))


def test_every_bad_line_is_named_behind_the_good_rows(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('red\n{"a": 1}\n[]\n{"a": 2}\n')
    rows = read_rows(path)
    assert [next(rows), next(rows)] == [(f"{path}:2", {"a": 1}), (f"{path}:4", {"a": 2})]
    with pytest.raises(DataError) as caught:
        next(rows)
    assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == [f"{path}:1", f"{path}:3"]
