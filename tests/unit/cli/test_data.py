"""`polyturn data` from the command line: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from polyturn.cli.main import main
from polyturn.data.formats import BUILT_IN
from polyturn.data.rows import read_rows


@pytest.fixture
def data(tmp_path, monkeypatch, capsys):
    """`polyturn data WORDS` in an empty folder: exit code, lines printed, lines of errors."""
    monkeypatch.chdir(tmp_path)

    def _data(*words: str):
        capsys.readouterr()
        try:
            code = main(["data", *words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out.splitlines(), shown.err.splitlines()

    return _data


def write(name, *rows):
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


ROWS = [{"question": f"What is {n} plus {n}, in words or digits?", "answer": str(2 * n), "id": n} for n in range(40)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_new_check_and_show(data, name):
    code, out, _ = data("new", "a.jsonl", "--format", name.replace("/", "_"))
    assert (code, out) == (0, [f"a.jsonl: 4 rows in the format {name}; `polyturn data check a.jsonl` looks at them"])
    code, out, err = data("check", "a.jsonl")
    assert (code, err, out[-1]) == (0, [], "ok: 0 errors, 0 warnings; 4 of 4 rows can be used")
    assert f"  format: {name} (" in out[1]
    code, out, _ = data("show", "a.jsonl", "--rows", "1")
    assert code == 0
    assert out[0] == f"a.jsonl:1 ({name})"
    assert "  user:        A bakery sells rolls in bags of 6. How many rolls are in 7 bags?" in out


def test_new_overwrites_nothing_unless_told_to(data):
    assert data("new", "a.jsonl")[0] == 0
    code, _, err = data("new", "a.jsonl")
    assert (code, err) == (2, ["polyturn: error: a.jsonl exists already; name another file, or give --force"])
    assert data("new", "a.jsonl", "--force")[0] == 0
    assert data("new", "b.jsonl", "--format", "questions")[0] == 2


def test_check_names_every_bad_row_and_ends_with_2(data):
    write("a.jsonl", *[{"question": "What is missing here?"} for _ in range(30)])
    code, out, err = data("check", "a.jsonl")
    assert (code, err) == (2, [])
    assert [line for line in out if line.startswith("a.jsonl:") and "missing" in line] == [
        f"a.jsonl:{line}: the field 'answer' is missing" for line in range(1, 31)
    ]
    assert out[-1].startswith("not ok: 30 errors")
    code, out, _ = data("check", "a.jsonl", "--json")
    assert code == 2
    assert len([found for found in json.loads("\n".join(out))["findings"] if found["severity"] == "error"]) == 30


def test_files_that_can_not_be_read_are_one_sentence(data, monkeypatch):
    code, out, err = data("check", "gone.jsonl")
    assert (code, out) == (2, [])
    assert err == ["polyturn: error: gone.jsonl does not exist; give a JSONL, JSON, CSV or Parquet file"]
    monkeypatch.setitem(sys.modules, "datasets", None)  # installed, it would ask the hub
    code, _, err = data("check", "hf:owner/name")
    assert code == 2
    assert "pip install 'polyturn[hub]'" in err[0]
    assert data("check")[0] == 2


def test_references_are_run_in_the_sandbox(data):
    tests = ["assert add(2, 3) == 5", "assert add(0, 1) == 1"]
    write(
        "a.jsonl",
        {"prompt": "Write add(a, b).", "response": "```python\ndef add(a, b):\n    return a + b\n```", "tests": tests},
        {"prompt": "Write add(a, b), again.", "response": "def add(a, b):\n    return 5", "tests": tests},
        {"prompt": "Double what is read.", "response": "print(2 * int(input()))", "test_cases": [{"input": 4, "output": "8"}]},
    )
    code, out, _ = data("check", "a.jsonl", "--run-tests")
    assert code == 2
    assert "  note: 3 references were run against their own tests, 2 pass" in out
    reason = "1 of 2 tests pass (AssertionError in test 2 (assert add(0, 1) == 1))"
    assert out[-2] == f"a.jsonl:2: the reference does not pass its own tests: {reason}"
    assert data("check", "a.jsonl")[0] == 0, "without the option nothing is run"


def test_check_with_a_transform(data, tmp_path, monkeypatch):
    (tmp_path / "my_rows_cli.py").write_text('def f(row):\n    return {"question": row["q"], "answer": row["a"]}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rows_cli", raising=False)
    write("a.jsonl", {"q": "What is two plus two?", "a": "4"}, {"q": "What is three plus three?"})
    code, out, _ = data("check", "a.jsonl", "--transform", "my_rows_cli:f")
    assert code == 2
    assert "a.jsonl:2: data.transform my_rows_cli:f raised KeyError at my_rows_cli.py:2: 'a'" in out
    code, _, err = data("check", "a.jsonl", "--transform", "my_rows_cli:g")
    assert code == 2
    assert "has no g" in err[0]


def test_show_lines(data):
    write("a.jsonl", *ROWS)
    _, out, _ = data("show", "a.jsonl", "--line", "7", "--line", "3")
    assert [line for line in out if line.startswith("a.jsonl")] == [
        "a.jsonl:7 (question/answer)",
        "a.jsonl:3 (question/answer)",
    ]
    code, _, err = data("show", "a.jsonl", "--line", "99")
    assert (code, err) == (2, ["polyturn: error: a.jsonl:99: no row starts on this line"])
    assert data("show", "a.jsonl", "--rows", "0")[0] == 2
    write("b.jsonl", {"start": "maple"})
    assert data("show", "b.jsonl")[1] == [
        "b.jsonl:1",
        "  problem: no built-in format has these fields: 'start'; the formats are instruction/response, input/output, "
        "problem/solution, prompt/answer, question/answer, messages; rename the fields, or give data.transform",
        "  start:       maple",
    ]


def test_split_writes_both_sides(data, tmp_path):
    write("a.jsonl", *ROWS)
    code, out, _ = data("split", "a.jsonl", "--val", "0.3", "--seed", "0")
    assert code == 0
    train, val = ([row for _, row in read_rows(f"a.{side}.jsonl")] for side in ("train", "val"))
    assert out[:2] == [f"a.train.jsonl: {len(train)} rows", f"a.val.jsonl: {len(val)} rows"]
    assert sorted((*train, *val), key=lambda row: row["id"]) == ROWS
    before = (tmp_path / "a.val.jsonl").read_bytes()
    code, _, err = data("split", "a.jsonl")
    assert (code, err) == (2, ["polyturn: error: a.train.jsonl exists already; name another file, or give --force"])
    assert (tmp_path / "a.val.jsonl").read_bytes() == before
    write("a.jsonl", *ROWS, {"question": "What is one hundred plus one?", "answer": "101", "id": 100})
    assert data("split", "a.jsonl", "--val", "0.3", "--force")[0] == 0
    again = [row for _, row in read_rows("a.val.jsonl")]
    assert again[: len(val)] == val
    assert data("split", "a.jsonl", "--val", "2")[0] == 2


def test_convert_containers_and_formats(data):
    write("a.jsonl", *ROWS)
    assert data("convert", "a.jsonl", "b.json.gz") == (0, ["b.json.gz: 40 rows"], [])
    assert [row for _, row in read_rows("b.json.gz")] == ROWS
    assert data("convert", "b.json.gz", "c.csv", "--format", "messages")[0] == 0
    assert data("convert", "c.csv", "d.jsonl", "--format", "question_answer")[0] == 0
    assert [{**row, "id": int(row["id"])} for _, row in read_rows("d.jsonl")] == ROWS
    write("e.jsonl", {"question": "x"}, [])
    code, _, err = data("convert", "e.jsonl", "f.csv")
    assert (code, err) == (2, ["polyturn: error: e.jsonl:2: the line is a list; an object is needed"])


RECIPE = """\
model: {path: "builtin:tiny"}
environment: {id: lookup, args: {instructions: false}}
rollout: {max_turn_tokens: 8, max_trajectory_tokens: 64}
"""


def test_check_against_a_recipe(data, tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE + "data: {cache_dir: cache}\n")
    good = {"start": "maple", "records": {"maple": {"next": ["otter"]}, "otter": {"value": "seven"}}, "answer": "seven"}
    write("a.jsonl", good, good | {"start": "oak"}, {"start": "maple"})
    code, out, _ = data("check", "a.jsonl", "--recipe", "r.yaml")
    assert code == 2
    assert "  opening messages in tokens: mean 6, median 6, 95 % under 6, longest 6 of 64 (line 1)" in out
    assert "a.jsonl:2: start 'oak' is no name of 'records'" in out
    assert "a.jsonl:3: field 'records' is missing or empty; a lookup row needs start, records and answer" in out
    assert any("(line 1), from the cache" in line for line in data("check", "a.jsonl", "--recipe", "r.yaml")[1])
    assert not any("cache" in line for line in data("check", "a.jsonl", "--recipe", "r.yaml", "--no-cache")[1])
    code, out, _ = data("show", "a.jsonl", "--recipe", "r.yaml", "--rows", "1")
    assert (code, out[:2]) == (0, ["a.jsonl:1, 6 tokens", "  user:        find(maple)"])
    write("b.jsonl", good | {"start": "x", "records": {"x": {"value": "seven"}}})
    code, out, _ = data("check", "b.jsonl", "--recipe", "r.yaml")
    assert code == 2
    assert any("b.jsonl:1: the word 'x' is not in the tokenizer's vocabulary" in line for line in out)


def test_check_against_a_recipe_of_rows(data, tmp_path):
    (tmp_path / "r.yaml").write_text(
        RECIPE.replace("lookup, args: {instructions: false}", "chat, args: {system: Be brief.}")
        + "data: {curriculum: easy_first}\n"
    )
    write("a.jsonl", *ROWS)
    code, _, err = data("check", "a.jsonl", "--recipe", "r.yaml")
    assert code == 2
    assert "environment chat has no closed vocabulary" in err[0]
