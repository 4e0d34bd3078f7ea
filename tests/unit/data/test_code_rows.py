"""Rows with programs: syntax, style, and references run against their own tests through the seam."""

from __future__ import annotations

import asyncio
import stat

import pytest

from polyturn.data.code_rows import find_ruff, is_code, references, run_references, style_findings, syntax_findings
from polyturn.data.formats import row_in
from polyturn.programs import Verdict


def row(answer, *, tests=("assert f() == 1",), **more):
    found, problems = row_in({"prompt": "Write f", "response": answer, "tests": list(tests), **more}, "a.jsonl:1", None)
    assert problems == ()
    return found


def reasons(found):
    return [(finding.severity, finding.reason) for finding in found]


def test_which_rows_are_code():
    assert is_code(row("def f(): return 1"))
    assert is_code(row("```python\nx\n```", tests=()))
    assert not is_code(row("Lima", tests=()))
    without, _ = row_in({"prompt": "x", "tests": ["assert 1"]}, "a:1", None)
    assert not is_code(without)


def test_syntax_of_program_and_tests():
    assert syntax_findings(1, row("def f():\n    return 1")) == []
    assert reasons(syntax_findings(1, row("```python\ndef f(:\n```"))) == [
        ("error", "the code in 'response' is not valid Python: line 1: invalid syntax")
    ]
    assert reasons(syntax_findings(1, row("The answer is f.\n```python\ndef f(:\n```", tests=()))) == [
        ("warning", "the code in 'response' is not valid Python: line 1: invalid syntax")
    ]
    assert reasons(syntax_findings(1, row("def f(): return 1", tests=("assert f() ==",)))) == [
        ("error", "tests[0] is not valid Python: line 1: invalid syntax")
    ]


def test_style_is_named_by_line_and_rule():
    ruff = find_ruff()
    assert ruff is not None, "ruff is one of the developer's tools"
    untidy = "import os\nimport sys\nimport re\nimport json\ndef f():\n    x = 1\n    return 1"
    rows = [(3, row(untidy)), (4, row("def f():\n    return 1")), (5, row("def f(:")), (6, row("no code here at all"))]
    (found,) = style_findings(rows, ruff)
    assert (found.line, found.severity, found.kind) == (3, "warning", "style")
    assert "line 1 F401" in found.reason
    assert found.reason.endswith("; and 2 more")
    assert style_findings([(4, row("Lima", tests=()))], ruff) == []


def test_a_ruff_that_says_nonsense_costs_no_check(tmp_path):
    fake = tmp_path / "ruff"
    fake.write_text("#!/bin/sh\necho nonsense\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    (found,) = style_findings([(3, row("def f():\n    return 1"))], str(fake))
    assert (found.line, found.reason) == (0, "ruff could not look at the style (JSONDecodeError)")


class Runner:
    """Passes what defines `f` to return 1; counts how many run at once."""

    def __init__(self):
        self.ran = []
        self.now = self.most = 0

    async def run_tests(self, code, tests, entry_points=None):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        self.ran.append((code, list(tests)))
        if "boom" in code:
            raise RuntimeError("the sandbox broke")
        right = "return 1" in code
        return Verdict(loaded=True, passed=(right,) * len(tests), reason=None if right else "AssertionError in test 1")


async def test_references_are_run_and_those_that_fail_are_errors():
    runner = Runner()
    rows = [(n, row("```python\ndef f():\n    return 1\n```")) for n in range(1, 20)]
    rows += [(20, row("def f():\n    return 2")), (21, row("The function adds.")), (22, row("Lima", tests=()))]
    chosen = references(rows)
    findings = await run_references(chosen, runner)
    assert len(chosen) == 21
    assert [(finding.line, finding.severity, finding.reason) for finding in findings] == [
        (20, "error", "the reference does not pass its own tests: 0 of 1 tests pass (AssertionError in test 1)"),
        (21, "error", "the reference holds no program to run"),
    ]
    assert runner.ran[0] == ("def f():\n    return 1", ["assert f() == 1"])
    assert 1 < runner.most <= 8


async def test_a_sandbox_that_breaks_is_no_verdict():
    with pytest.raises(RuntimeError, match="the sandbox broke"):
        await run_references(references([(1, row("boom = 1"))]), Runner())
