"""Containers: JSONL, JSON arrays, CSV and Parquet, each in gzip too; a bad record never hides the next."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.data.readers import RowFile
from polyturn.data.records import Record
from polyturn.data.rows import ListedRows, open_rows, read_rows
from polyturn.data.writers import container_of, write_rows
from polyturn.errors import DataError, MissingDependencyError


@pytest.fixture
def read(tmp_path):
    def _read(name: str, content: bytes | str):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        file = RowFile(path)
        return file, [(record.line, record.row if record.problem is None else record.problem) for record in file]

    return _read


TEXTS = st.text(max_size=12)
FLAT = st.lists(st.fixed_dictionaries({"question": TEXTS, "answer": TEXTS}), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("containers")


@given(rows=FLAT, name=st.sampled_from(["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"]))
def test_json_containers_give_back_what_is_written(folder, rows, name):
    write_rows(folder / name, rows, force=True)
    assert [row for _, row in read_rows(folder / name)] == rows


@given(rows=FLAT, name=st.sampled_from(["a.csv", "a.tsv", "a.csv.gz"]))
def test_csv_gives_back_what_is_written(folder, rows, name):
    write_rows(folder / name, rows, force=True)
    text = gzip.decompress((folder / name).read_bytes()) if name.endswith("gz") else (folder / name).read_bytes()
    expected = [row for row in rows if any(value.strip() for value in row.values())]
    if b"\0" in text or any("\r" in value for row in rows for value in row.values()):
        return  # no text, or a line end that CSV readers take for another
    found = [dict(record.row) for record in RowFile(folder / name) if record.row is not None]
    assert found == expected


def test_lines_of_an_array_are_those_of_its_elements(read):
    text = '[\n {"a": 1},\n\n {"a": 2,\n  "b": 3}, {"a": 4},\n 5,\n {"a": 6, "a": 7},\n {"a": 8}\n]\n'
    file, found = read("a.json", text)
    assert found == [
        (2, {"a": 1}),
        (4, {"a": 2, "b": 3}),
        (5, {"a": 4}),
        (6, "this element is a number; an object is needed"),
        (7, "the key 'a' is given twice in one object"),
        (8, {"a": 8}),
    ]
    assert file.notes == ["one JSON array, 4 rows found in it"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a": 1}, {"a": ', (1, "not valid JSON: it ends too early; the file looks cut off (no newline at its end)")),
        ('[{"a": 1},\n{"a": 2}', (2, "not valid JSON: the JSON array never ends; the file looks cut off")),
        ('[{"a": 1}\n{"a": 2}]', (2, "not valid JSON: a comma is missing before this")),
        ('[{"a": 1},\n{"a": 2,}]', (2, "not valid JSON: a comma before the closing brace; remove it")),
        ('[{"a": 1}]\nred', (1, "text after the end of the JSON array; remove it")),
        ("[]", (0, "the file holds no rows")),
    ],
)
def test_arrays_that_go_wrong(read, text, problem):
    _, found = read("a.json", text)
    line, reason = found[-1]
    assert line == problem[0]
    assert str(reason).startswith(problem[1])


def test_what_a_file_holds_is_seen_from_its_first_bytes(read):
    assert read("a.jsonl", '[{"a": 1}, {"a": 2}]')[0].shown == "JSON array"
    assert read("a.jsonl", '["a"]\n{"a": 1}\n')[1] == [(1, "the line is a list; an object is needed"), (2, {"a": 1})]
    assert read("a.json", '{"a": 1}\n{"a": 2}\n')[1] == [(1, {"a": 1}), (2, {"a": 2})]
    assert read("a", '{"a": 1}\n')[0].shown == "JSONL"
    assert read("a.jsonl", gzip.compress(b'{"a": 1}\n'))[0].shown == "JSONL, gzip"
    with pytest.raises(DataError, match="of no known kind; name it"):
        read("a.txt", "question,answer\n")
    with pytest.raises(DataError, match="is called Parquet and is none"):
        read("a.parquet", "question,answer\n")
    with pytest.raises(DataError, match=r"is called \.gz and holds no gzip data"):
        read("a.jsonl.gz", '{"a": 1}\n')


def test_one_object_over_several_lines_is_said_once(read):
    assert read("a.jsonl", '{\n "a": 1\n}\n{\n "a": 2\n}\n')[1] == [
        (1, "the first object goes over 3 lines; write one object a line")
    ]
    pretty = json.dumps({"version": 1, "data": [{"a": 1}, {"a": 2}]}, indent=1)
    ((line, reason),) = read("a.json", pretty)[1]
    assert line == 1
    assert reason == (
        "the file is one JSON object over 11 lines; its rows may be under 'data': write one object a line, or an array"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'a': 1}", "single quotes; JSON has double quotes (column 2)"),
        ('{"a": None}', "None is Python; JSON writes null (column 7)"),
        ('{"a": True}', "True is Python; JSON writes true (column 7)"),
        ('{"a": "b\tc"}', "a line end or control character inside a string"),
        ('{"a": 1]', "expecting ',' delimiter, found ']' (column 8)"),
        ('{"a": [1,]}', "a comma before the closing bracket; remove it (column 9)"),
        ('{"a": 1} red', "text after the value, found 'red'"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' is given twice in one object"),
        ('{"a": ["x", {"b": "\\udc00"}]}', "'a[1].b' holds a lone surrogate (\\udc00)"),
        ('{"\\ud800": 1}', '"a field\'s name" holds a lone surrogate'),
    ],
)
def test_mistakes_in_a_line(read, line, said):
    _, found = read("a.jsonl", f'{line}\n{{"a": 1}}\n')
    assert said in found[0][1]
    assert found[1] == (2, {"a": 1})


def test_broken_gzip_is_said_with_a_line(read):
    raw = b"".join(json.dumps({"a": str(n) * 50}).encode() + b"\n" for n in range(500))
    packed = gzip.compress(raw)
    _, found = read("a.jsonl.gz", packed[: len(packed) // 2])
    line, reason = found[-1]
    assert line == len(found)
    assert "broken gzip data" in reason
    assert "copy the file again" in reason


# ── CSV ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_csv_cells_lists_and_lines(read):
    text = 'question,tests,tags\n"two\nlines","[""assert f(1)"", ""assert f(2)""]","a, b"\n\nq,,\n'
    file, found = read("a.csv", text)
    assert found == [
        (2, {"question": "two\nlines", "tests": ["assert f(1)", "assert f(2)"], "tags": "a, b"}),
        (5, {"question": "q", "tests": "", "tags": ""}),
    ]
    assert file.blank_lines == 1


def test_csv_mistakes_are_named_and_reading_goes_on(read):
    raw = 'a,b\n1\n1,2,3\n"x"y,2\nç,é\n"[1,",2\n5,6\n"7,8\n'.encode().replace("ç".encode(), b"\xe7")
    _, found = read("a.csv", raw.replace(b'"[1,",2', b'"[1,",2'))
    assert [line for line, _ in found] == [2, 3, 4, 5, 6, 7, 8]
    assert found[0][1] == "1 cells, and the first line names 2; quote a cell with commas"
    assert found[1][1].startswith("3 cells")
    assert found[2][1].startswith("not valid CSV: ")
    assert found[3][1].startswith("not valid UTF-8: byte 0xE7 at byte 1 of the line")
    assert found[4][1] == {"a": "[1,", "b": "2"}, "only the fields that are lists hold JSON"
    assert found[5][1] == {"a": "5", "b": "6"}
    assert found[6][1] == "not valid CSV: a quote is opened and never closed"


def test_csv_json_cells_that_are_no_json(read):
    assert "'tags' starts like a list and is not valid JSON" in read("a.csv", 'q,tags\nx,"[a, b"\n')[1][0][1]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("a,a", "the column 'a' is there twice; rename one"),
        ("a,,b", "column 2 has no name; the first line must name every column"),
    ],
)
def test_csv_headers(read, header, said):
    assert read("a.csv", f"{header}\n1,2,3\n")[1] == [(1, said)]


def test_csv_of_a_header_only_and_other_delimiters(read):
    assert read("a.csv", "a,b\n")[1] == [(0, "the file holds no rows")]
    file, found = read("a.csv", "a;b\n1;2,5\n")
    assert found == [(2, {"a": "1", "b": "2,5"})]
    assert file.notes == ["cells are cut at ';'"]
    assert read("a.tsv", "a\tb\n1\t2\n")[1] == [(2, {"a": "1", "b": "2"})]
    assert read("a.csv", b"\xef\xbb\xbfa,b\r\n1,2\r\n")[1] == [(2, {"a": "1", "b": "2"})]


def test_csv_cells_of_any_length(read):
    long = "x" * 300_000
    assert read("a.csv", f"a,b\n{long},2\n")[1] == [(2, {"a": long, "b": "2"})]


@given(st.binary(max_size=80), st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz"]))
def test_any_bytes_are_records_or_one_sentence(folder, content, name):
    path = folder / f"any-{name}"
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    try:
        records = list(RowFile(path))
    except (DataError, MissingDependencyError) as error:
        records = [Record(line=0, problem=str(error))]
    assert not [record for record in records if "\n" in (record.problem or "")]
    assert records, "an empty list would be a silent run of no steps"
    assert all((record.row is None) != (record.problem is None) for record in records)
    assert all(0 <= record.line <= content.count(b"\n") + 1 for record in records)


# ── Parquet ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
def test_parquet_round_trip(tmp_path):
    rows = [
        {"question": "2 + 2?", "answer": "4", "tags": ["sum"], "messages": [{"role": "user", "content": "x"}]},
        {"question": "é 🙂", "answer": None, "tags": [], "messages": []},
    ]
    for name in ("a.parquet", "a.parquet.gz", "a.pq"):
        write_rows(tmp_path / name, rows)
        file = RowFile(tmp_path / name)
        assert [dict(record.row or {}) for record in file] == rows
        assert [record.line for record in RowFile(tmp_path / name)] == [1, 2]
        assert file.notes == ["Parquet has no lines: the numbers are those of the rows"]
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:200])
    ((record,)) = list(RowFile(tmp_path / "b.parquet"))
    assert "broken Parquet data" in (record.problem or "")


def test_parquet_without_pyarrow_is_one_sentence(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingDependencyError, match=r"package pyarrow reads; pip install 'polyturn\[parquet\]'"):
        list(RowFile(tmp_path / "a.parquet"))
    with pytest.raises(MissingDependencyError, match="package pyarrow writes"):
        write_rows(tmp_path / "b.parquet", [{"a": 1}])
    assert not (tmp_path / "b.parquet").exists()


# ── writing, and rows from elsewhere ───────────────────────────────────────────────────────────────────────────────────


def test_files_are_not_overwritten_and_appear_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    write_rows(path, [{"a": "é"}])
    assert path.read_text(encoding="utf-8") == '{"a": "é"}\n'
    with pytest.raises(DataError, match="exists already; name another file, or give --force"):
        write_rows(path, [{"a": "b"}])
    with pytest.raises(DataError, match="can't be written as JSON"):
        write_rows(path, [{"a": float("nan")}], force=True)
    assert path.read_text(encoding="utf-8") == '{"a": "é"}\n'
    assert [found.name for found in tmp_path.iterdir()] == ["a.jsonl"]
    with pytest.raises(DataError, match="does not exist; make it first"):
        write_rows(tmp_path / "no" / "a.jsonl", [])
    with pytest.raises(DataError, match="does not say what it is to be; name it"):
        container_of("a.txt")


def test_csv_columns_are_those_of_all_rows(tmp_path):
    write_rows(tmp_path / "a.csv", [{"a": "1"}, {"b": ["x"], "a": None}, {"b": 2.5}])
    assert list(csv.reader(io.StringIO((tmp_path / "a.csv").read_text()))) == [
        ["a", "b"],
        ["1", ""],
        ["", '["x"]'],
        ["", "2.5"],
    ]


def test_rows_from_elsewhere_keep_their_places():
    rows = ListedRows(
        "hf:owner/name", "hub data set", [("hf:owner/name@train:1", {"a": 1}), ("hf:owner/name@train:2", {"a": 2})]
    )
    assert [(rows.place(record.line), record.row) for record in rows] == [
        ("hf:owner/name@train:1", {"a": 1}),
        ("hf:owner/name@train:2", {"a": 2}),
    ]
    assert rows.place(0) == "hf:owner/name"
    assert [record.problem for record in ListedRows("x", "y", [])] == ["no rows"]
    assert isinstance(open_rows("hf:owner/name"), ListedRows)
