"""Rows of HumanEval, of MBPP and of built-in formats as problems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyturn.data.formats import row_in
from polyturn.environments.code import rows
from polyturn.environments.code.problems import Problem
from polyturn.errors import DataError
from polyturn.programs import OutputCase
from polyturn.types import Task

DATA = Path(__file__).parents[3] / "data"
HUMANEVAL = [json.loads(line) for line in (DATA / "humaneval_4.jsonl").read_text().splitlines()]
MBPP = [json.loads(line) for line in (DATA / "mbpp_12.jsonl").read_text().splitlines()]


def built_in(**fields):
    row, problems = row_in({"prompt": "Write a function that adds.", **fields}, "a.jsonl:1", None)
    assert problems == ()
    return rows.built_in(row)


def test_kinds_are_told_by_their_fields():
    assert all(rows.is_humaneval(row) and not rows.is_mbpp(row) for row in HUMANEVAL)
    assert all(rows.is_mbpp(row) and not rows.is_humaneval(row) for row in MBPP)
    assert rows.is_mbpp({"text": "x", "code": "y", "test_list": []})
    assert not rows.is_mbpp({"prompt": "x", "response": "y", "tests": []})


def test_a_check_of_assertions_is_a_case_each():
    made = rows.humaneval(HUMANEVAL[1])
    assert made.problem.cases == (
        "assert truncate_number(3.5) == 0.5",
        "assert abs(truncate_number(1.33) - 0.33) < 1e-06",
        "assert abs(truncate_number(123.456) - 0.456) < 1e-06",
    )
    assert (made.problem.names, made.problem.classes, made.problem.most_public) == (("truncate_number",), (), 3)
    assert "0.33" not in made.problem.setup, "the hidden assertions are nowhere but in the cases"
    assert made.reference is not None
    assert made.reference.startswith("\n\ndef truncate_number")
    (message,) = made.messages
    assert message.content.startswith("Complete this Python function.\n\n```python\ndef truncate_number")


@pytest.mark.parametrize("row", HUMANEVAL[2:], ids=lambda row: row["entry_point"])
def test_a_check_that_does_more_stays_whole_and_hidden(row):
    made = rows.humaneval(row)
    assert made.problem.cases == (f"check({row['entry_point']})",)
    assert made.problem.most_public == 0
    helper = {"find_zero": "poly", "decode_cyclic": "encode_cyclic"}[row["entry_point"]]
    assert f"def {helper}" in made.problem.setup
    assert f"def {helper}" in made.problem.preamble


def test_assertions_that_ask_the_program_nothing_are_left_out():
    test = "def check(candidate):\n    assert True, 'This prints if ...'\n    assert candidate(1) == 2\n"
    row = {**HUMANEVAL[1], "test": test}
    assert rows.humaneval(row).problem.cases == ("assert truncate_number(1) == 2",)
    only = rows.humaneval({**row, "test": "def check(candidate):\n    assert True\n"}).problem
    assert only.cases == ("check(truncate_number)",)


def test_mbpp_names_the_function_and_keeps_its_tests():
    made = rows.mbpp(MBPP[0])
    assert made.messages[0].content == (
        "Write a python function to find the first repeated character in a given string.\n\n"
        "The program must define `first_repeated_char(str1)`."
    )
    assert made.problem.cases == tuple(MBPP[0]["test_list"])
    assert (made.problem.names, made.problem.classes) == (("first_repeated_char",), ())


def test_mbpp_in_its_whole_form():
    row = {
        "text": "Write a class Box and a function fill(box, n).",
        "code": "class Box:\n    pass\ndef fill(box, n):\n    box.n = n\n    return box",
        "test_setup_code": "import math",
        "test_list": ["assert fill(Box(), 1).n == 1"],
        "challenge_test_list": ["assert math.isclose(fill(Box(), 0.1).n, 0.1)"],
    }
    made = rows.mbpp(row)
    assert made.messages[0].content == row["text"], "it names both"
    assert made.problem.cases == (row["test_list"][0], row["challenge_test_list"][0])
    assert (made.problem.names, made.problem.classes) == (("Box", "fill"), ("Box",))
    assert "import math" in made.problem.setup.splitlines()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"test_list": []}, "field 'test_list' is empty"),
        ({"test_list": "assert f()"}, "must be a list of texts"),
        ({"code": ""}, "field 'code' is empty"),
        ({"code": 5}, "field 'code' is a int"),
        ({"code": "def other(): pass"}, "no test uses what the reference defines"),
        ({"prompt": None, "text": None}, "field 'text' is missing"),
    ],
)
def test_mbpp_rows_that_can_not_be_used(change, said):
    with pytest.raises(DataError, match=said):
        rows.mbpp({**MBPP[0], **change})


def test_humaneval_rows_that_can_not_be_used():
    with pytest.raises(DataError, match="field 'canonical_solution' is missing"):
        rows.humaneval({key: value for key, value in HUMANEVAL[0].items() if key != "canonical_solution"})
    with pytest.raises(DataError, match="is no Python"):
        rows.humaneval({**HUMANEVAL[0], "prompt": "def f(:"})


def test_built_in_rows():
    made = built_in(response="```python\ndef add(a, b=1):\n    return a + b\n```", tests=["assert add(1) == 2"])
    assert made.reference == "def add(a, b=1):\n    return a + b"
    assert made.messages[-1].content == "Write a function that adds.\n\nThe program must define `add(a, b=1)`."
    assert made.problem.names == ("add",)
    cases = built_in(test_cases=[{"input": "1 2", "output": 3}])
    assert cases.problem.cases == (OutputCase(stdin="1 2", stdout="3"),)
    assert (cases.reference, cases.problem.names) == (None, None)
    assert rows.shown_case(cases.problem.cases[0]) == "for the input '1 2' it prints '3'"


def test_built_in_rows_that_can_not_be_used():
    with pytest.raises(DataError, match="neither 'tests' nor 'test_cases'"):
        built_in(response="Lima")
    with pytest.raises(DataError, match=r"tests\[0\] is not valid Python"):
        built_in(response="def add(): pass", tests=["assert add( =="])


def test_a_problem_survives_the_task():
    problem = Problem(
        cases=("assert f()", OutputCase(stdin="a", stdout="b")), most_public=1, setup="x = 1", names=("f",), classes=()
    )
    info = json.loads(json.dumps(problem.info()))
    assert Problem.of(Task(id="a", environment="python_code", messages=(), info=info)) == problem
    with pytest.raises(DataError, match="no info field 'cases'"):
        Problem.of(Task(id="a", environment="chat", messages=()))


def test_a_preamble_goes_before_and_a_stub_is_continued():
    problem = rows.humaneval(HUMANEVAL[0]).problem
    whole = "def has_close_elements(numbers: List[float], threshold: float) -> bool:\n    return False"
    source = problem.program(whole)
    assert source.text == f"from typing import List\n{whole}"
    assert source.shift == 1
    assert problem.program("from __future__ import annotations\n" + whole).shift == 0
    for body in ("    return numbers == []", "return numbers == []"):
        continued = problem.program(body).text
        assert continued.startswith("from typing import List\n\n\ndef has_close_elements")
        assert continued.endswith('"""\n    return numbers == []')
    assert problem.program("print('nothing of the kind')").text.endswith("print('nothing of the kind')")
    assert problem.program("def other(): (").text == "def other(): ("


def test_code_that_python_warns_of_is_code():
    row = {
        "prompt": "Find.",
        "code": "import re\ndef find(s):\n    return re.findall('\\.', s)",
        "test_list": ["assert find('\\.')"],
    }
    made = rows.mbpp(row)
    assert "`find(s)`" in made.messages[0].content
    problem = rows.humaneval(HUMANEVAL[0]).problem
    assert problem.program("return '\\.' in numbers").text.endswith("\n    return '\\.' in numbers")
