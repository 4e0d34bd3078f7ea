"""Programs in replies: which text is taken, and that nothing a model writes upsets the parser."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parts.patience import PATIENCE_S
from polyturn.errors import DataError
from polyturn.programs import (
    MOST_CHARACTERS,
    EntryPoints,
    OutputCase,
    Verdict,
    entry_points,
    fenced_blocks,
    looks_like_code,
    program_in,
    row_tests,
    syntax_problem,
)

ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    "reply",
    [
        ADD,
        f"\n{ADD}\n\n",
        f"```python\n{ADD}\n```",
        f"Here:\n\n```py\n{ADD}\n```\nIt adds.",
        f"```\n{ADD}\n```",
        f"```python\n{ADD}",
        f"~~~python\n{ADD}\n~~~",
        f"~~~~ Python3\n{ADD}\n~~~~",
        f"```python\r\n{ADD.replace(chr(10), chr(13) + chr(10))}\r\n```",
        f"First:\n```python\ndef add(a, b):\n    return a - b\n```\nWrong, so:\n```python\n{ADD}\n```",
        f"```python\n{ADD}\n```\nIt prints\n```\n5\n```\nand in a shell\n```bash\npython add.py\n```",
        f"```python\n{ADD}\n```\n```python\n```",
        f"1. Like this:\n   ```python\n   {ADD.replace(chr(10), chr(10) + '   ')}\n   ```",
        f"Use ```x``` here:\n```python\n{ADD}\n```",
    ],
)
def test_the_program_of_a_reply(reply):
    assert program_in(reply).code == ADD


def test_a_fence_closes_at_the_start_of_a_line_only():
    code = "def add(a, b):\n    s = '''```'''\n    return a + b"
    assert program_in(f"```python\n{code}\n```").code == code
    longer = '"""\n```\nexample\n```\n"""'
    assert program_in(f"````python\n{longer}\n````").code == longer


def test_without_a_python_tag_the_last_untagged_block_counts_then_the_last():
    assert program_in("```\na = 1\n```\n```text\nred\n```").code == "a = 1"
    assert program_in("```js\nlet a\n```\n```text\nred\n```").code == "red"


@pytest.mark.parametrize(
    ("reply", "dress"),
    [
        ("```python\n```", "empty_fence"),
        ("```python\n  \n\t\n", "empty_fence"),
        ("The function adds a and b.", "none"),
        ("Use x = 3 here.", "none"),
        ("If you like:", "none"),
        ("Yes, it is (really)", "none"),
        ("", "none"),
        ("  \n", "none"),
        ("print(3)", "bare"),
        ("a, b = b, a", "bare"),
        ("import os", "bare"),
        ("def f(:", "bare"),
        ("42", "bare"),
    ],
)
def test_replies_without_a_fence(reply, dress):
    found = program_in(reply)
    assert found.dress == dress
    assert bool(found.code) == (dress == "bare")


@given(st.text(alphabet="`~ \n\tpython:=()ab\r", max_size=60))
def test_any_text_gives_a_program_that_stands_in_it(text):
    found = program_in(text)
    assert (found.dress in ("bare", "fence")) == bool(found.code.strip())
    plain = "".join(text.replace("\r\n", "\n").replace("\r", "\n").split())
    assert "".join(found.code.split()) in plain
    for _, block in fenced_blocks(text.replace("\r", "")):
        assert "".join(block.split()) in plain


@given(
    code=st.from_regex(r"[a-z]{1,5} = [0-9]{1,3}(\n[a-z]{1,5} = '[a-z ]{0,9}'){0,3}", fullmatch=True),
    tag=st.sampled_from(["", "python", "PY"]),
)
def test_what_is_put_into_a_fence_comes_out(code, tag):
    assert program_in(f"So\n```{tag}\n{code}\n```\nDone.").code == code
    assert program_in(code).code == code


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("x = 1", None),
        ("def f(:\n    pass", "line 1: "),
        ("x = 1\n  y = 2", "line 2: unexpected indent"),
        ("x = '\\d'", None),
        ("a\0b", "null bytes"),
        ("(" * 5000, "it can't be parsed|line 1"),
        ("x" * (MOST_CHARACTERS + 1), "200,001 characters, more than the 200,000 that are parsed"),
    ],
)
def test_syntax(code, problem):
    found = syntax_problem(code)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert any(part in found for part in problem.split("|")), found


def test_prose_over_several_lines_is_no_code():
    assert not looks_like_code("The train leaves at nine.\nIt arrives at noon, so it takes three hours.")


def test_verdicts():
    half = Verdict(loaded=True, passed=(True, False), reason="AssertionError in test 2")
    assert (half.share, half.all_passed) == (0.5, False)
    assert Verdict(loaded=True, passed=(True,)).all_passed
    assert not Verdict(loaded=False, passed=(True,)).all_passed
    nothing = Verdict(loaded=True, passed=())
    assert (nothing.share, nothing.all_passed) == (0.0, False)


def test_entry_points_are_what_tests_use_of_the_reference():
    reference = "import math\nclass Stack:\n    pass\ndef push(s): ...\ndef inner(): ...\ntwice = lambda x: 2 * x\nK = 3"
    found = entry_points(reference, ["assert push(Stack()) == math.pi", "assert twice(K) == 6", "assert ("])
    assert found == EntryPoints(names=("Stack", "push", "twice"), classes=("Stack",))
    assert entry_points(reference, ["assert other() == 1"]) is None
    assert entry_points("def push(:", ["assert push()"]) is None


def test_cases_of_a_row():
    assert row_tests(["assert f()"], [{"input": "1\n", "output": 2.5}, {"input": 3, "output": ""}]) == [
        "assert f()",
        OutputCase(stdin="1\n", stdout="2.5"),
        OutputCase(stdin="3", stdout=""),
    ]
    for wrong in ({"input": None, "output": "1"}, {"input": "1", "output": {"a": 1}}):
        with pytest.raises(DataError, match=r"test_cases\[0\]\.(input|output) is a (NoneType|dict)"):
            row_tests([], [wrong])


SIDE_BY_SIDE = r"""
import sys, threading
from polyturn.programs import syntax_problem

def check():
    assert all(syntax_problem("x = '\\w'") is None for _ in range(2000))

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=check) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_programs_parsed_side_by_side_say_nothing():
    r"""Python warns of "\w", where warnings are errors it is one; the filter for that belongs to the whole process."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", SIDE_BY_SIDE], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ended.returncode, ended.stderr) == (0, "")
