"""Rows of HumanEval and MBPP: what of them is the program's and what the tests'. With `real`, all references pass."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from polyturn.errors import DataError
from polyturn.sandbox.base import Limits, Program
from polyturn.sandbox.local import LocalSandbox
from polyturn.sandbox.suites import humaneval, mbpp

HUMANEVAL = {
    "task_id": "Test/1",
    "prompt": "import math\n\n\ndef poly(x):\n    return x - 2\n\n\ndef root():\n    '''Finds the zero of poly.'''\n",
    "entry_point": "root",
    "canonical_solution": "    return 2\n",
    "test": "def check(candidate):\n    assert math.fabs(poly(candidate())) < 1e-4\n",
}
MBPP = {
    "task_id": 7,
    "code": "import math\ndef sum(a, b):\n    return helper(a) + b\ndef helper(a):\n    return a",
    "test_imports": [],
    "test_list": ["assert math.isclose(sum(1, 2), 3)", "assert sum(0, 0) == 0"],
}


def test_a_humaneval_row():
    program, tests = humaneval(HUMANEVAL)
    assert program == Program(source=HUMANEVAL["prompt"] + "    return 2\n")
    assert (tests.cases, tests.entry_points) == (("check(root)",), ("root",))
    assert "def poly(x):" in tests.setup
    assert "import math" in tests.setup
    assert "def root" not in tests.setup
    assert mbpp({**MBPP, "code": 'def sum(a, b):\n    return "\\w"'})[1].entry_points == ("sum",)
    assert humaneval(HUMANEVAL, "    return 3\n")[0].source.endswith("return 3\n")
    with pytest.raises(DataError, match="Test/1: line 1 is no Python"):
        humaneval({**HUMANEVAL, "prompt": "def root(:\n"})


def test_an_mbpp_row():
    program, tests = mbpp(MBPP)
    assert program == Program(source=MBPP["code"])
    assert (tests.setup, tests.entry_points, tests.total) == ("import math", ("sum",), 2)
    assert mbpp(MBPP, "x = 1")[0].source == "x = 1"
    with pytest.raises(DataError, match="no test uses what the reference defines"):
        mbpp({**MBPP, "code": "x = 1"})


async def test_a_program_can_not_bring_the_helper_that_judges_it():
    sandbox = LocalSandbox(Limits(wall_s=60))
    await sandbox.start()
    try:
        honest, forged = humaneval(HUMANEVAL), humaneval(HUMANEVAL, "    return 7\n\ndef poly(x):\n    return 0\n")
        assert (await sandbox.run_tests(*honest)).all_passed
        assert (await sandbox.run_tests(*forged)).passed == 0
        row = mbpp(MBPP, "class math:\n    isclose = staticmethod(lambda *a: True)\ndef sum(a, b):\n    return a - b")
        assert [outcome.status for outcome in (await sandbox.run_tests(*row)).outcomes] == ["failed", "passed"]
    finally:
        await sandbox.stop()


def rows(name: str) -> list[dict]:
    lines = (Path(os.environ["POLYTURN_DATA"]) / "code" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.real
@pytest.mark.parametrize(("name", "read", "total"), [("humaneval.jsonl", humaneval, 164), ("mbpp_sanitized.jsonl", mbpp, 427)])
async def test_all_references_pass_and_programs_that_do_nothing_fail(name, read, total):
    """A program that returns None, or its first argument, passes nowhere, but where that is the right answer to all cases."""
    sandbox = LocalSandbox(Limits(wall_s=120, cpu_s=60))
    await sandbox.start()
    try:
        found = rows(name)
        assert len(found) == total
        verdicts = await asyncio.gather(*[sandbox.run_tests(*read(row)) for row in found])
        failed = {row["task_id"]: verdict for row, verdict in zip(found, verdicts, strict=True) if not verdict.all_passed}
        assert failed == {}
        wrong = []
        for row in found:
            _, tests = read(row)
            (name_of_function, *_) = tests.entry_points
            wrong.append(sandbox.run_tests(Program(source=f"def {name_of_function}(*arguments):\n    return None"), tests))
        passed = [
            row["task_id"] for row, verdict in zip(found, await asyncio.gather(*wrong), strict=True) if verdict.all_passed
        ]
        assert passed == []
    finally:
        await sandbox.stop()
