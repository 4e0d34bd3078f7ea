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
        (b'{"a": 1}\n\n{"a": \n', "{path}:3: not JSON (Expecting value at column 6); one JSON object a line is needed"),
        (b'{"a": 1}\n[1, 2]\n', "{path}:2: a list, not a JSON object; one JSON object a line is needed"),
        (b'"red"\n', "{path}:1: a str, not a JSON object; one JSON object a line is needed"),
        (b"null\n", "{path}:1: a NoneType, not a JSON object; one JSON object a line is needed"),
        (b'{"a": 1} {"b": 2}\n', "{path}:1: not JSON (Extra data at column 10); one JSON object a line is needed"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "{path}:2: not UTF-8 (byte 7); save the file as UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "{path}:1: not UTF-8 (byte 0); save the file as UTF-8"),
        (b"", "{path} holds no rows; a JSONL file has one JSON object a line"),
        (b"\xef\xbb\xbf", "{path} holds no rows; a JSONL file has one JSON object a line"),
        (b"\n \r\n\t\n", "{path} holds no rows; a JSONL file has one JSON object a line"),
        (b'{"a": 1}\n\xef\xbb\xbf{"a": 2}\n', "{path}:2: not JSON ("),
        (b'{"a": NaN}\n', "{path}:1: not JSON (NaN is no number there, write null); one JSON object a line is needed"),
        (
            b'{"a": [-Infinity]}\n',
            "{path}:1: not JSON (-Infinity is no number there, write null); one JSON object a line is needed",
        ),
        (b'{"a": 1' + b"0" * 5000 + b"}\n", "{path}:1: not JSON ("),
        (b'{"a": ' + b"[" * 100_000 + b"\n", "{path}:1: not JSON ("),
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
    said = said.format(path=path)
    rule = "; one JSON object a line is needed"
    assert str(caught.value) == said or (said.endswith("(") and str(caught.value).startswith(said)), caught.value
    assert str(caught.value).endswith(rule) or "not JSON" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "data.jsonl", tmp_path):
        with pytest.raises(DataError, match="does not exist; give a JSONL file"):
            list(read_rows(path))


def test_good_rows_come_before_the_bad_one(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\nred\n')
    rows = read_rows(path)
    assert [next(rows)[1], next(rows)[1]] == [{"a": 1}, {"a": 2}]
    with pytest.raises(DataError, match=r"data\.jsonl:3: not JSON"):
        next(rows)
