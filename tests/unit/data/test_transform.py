"""`data.transform`: the user's function between file and format, and what is said when it goes wrong."""

from __future__ import annotations

import sys

import pytest

from polyturn.data.load import load, load_formatted
from polyturn.data.transform import Transform
from polyturn.errors import ConfigError, DataError

SOURCE = """
def rename(row):
    return {"question": row["q"], "answer": row["a"]}

def drop_odd(row):
    return row if row["n"] % 2 == 0 else None

def changes_its_row(row):
    row["inner"]["x"] = 1
    return row

def wrong(row):
    return [row]

def numbers_for_names(row):
    return {1: 2}

async def later(row):
    return row

constant = 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rows", raising=False)
    yield tmp_path
    sys.modules.pop("my_rows", None)


@pytest.mark.parametrize("path", ["my_rows:rename", "my_rows.rename"])
def test_a_function_by_either_spelling(module, path):
    (module / "a.jsonl").write_text('{"q": "x", "a": "y"}\n')
    (row,) = load_formatted("a.jsonl", Transform(path))
    assert (row.where, row.format, row.answer) == ("a.jsonl:1", "question/answer", "y")


def test_rows_are_dropped_and_counted(module):
    (module / "a.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(5)))
    loaded = load("a.jsonl", Transform("my_rows:drop_odd"))
    assert ([line for line, _ in loaded.rows], loaded.dropped) == ([1, 3, 5], 2)
    (module / "b.jsonl").write_text('{"n": 1}\n{"n": 3}\n')
    assert load("b.jsonl", Transform("my_rows:drop_odd")).problems == ((0, "no rows are left: data.transform dropped all 2"),)


def test_an_exception_is_a_problem_of_its_line(module):
    (module / "a.jsonl").write_text('{"q": "x", "a": "y"}\n\n{"q": "x"}\n[]\n{"q": "z", "a": "y"}\n')
    with pytest.raises(DataError) as caught:
        load_formatted("a.jsonl", Transform("my_rows:rename"))
    assert str(caught.value).splitlines() == [
        "a.jsonl:3: data.transform my_rows:rename raised KeyError at my_rows.py:3: 'a'",
        "a.jsonl:4: the line is a list; an object is needed",
    ]


@pytest.mark.parametrize("name", ["wrong", "numbers_for_names"])
def test_anything_but_a_row_is_refused(module, name):
    with pytest.raises(DataError, match=r"a row \(a dict with names as keys\) or None is needed"):
        Transform(f"my_rows:{name}")({"a": 1})


def test_the_row_given_is_not_changed(module):
    row = {"inner": {}}
    assert Transform("my_rows:changes_its_row")(row) == {"inner": {"x": 1}}
    assert row == {"inner": {}}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("my_rows:constant", "is no function"),
        ("my_rows:later", "is a coroutine function; write it with def"),
        ("my_rows:renam", "did you mean rename"),
        ("my_row:rename", "no module named my_row"),
        ("rename", "is no dotted path"),
    ],
)
def test_paths_that_lead_nowhere(module, path, said):
    with pytest.raises(ConfigError, match=said):
        Transform(path)


def test_the_key_changes_with_the_source(module):
    first = Transform("my_rows:rename").key
    assert Transform("my_rows:rename").key == first
    assert Transform("my_rows:wrong").key != first
    (module / "my_rows.py").write_text(SOURCE + "# changed\n")
    assert Transform("my_rows:rename").key != first
