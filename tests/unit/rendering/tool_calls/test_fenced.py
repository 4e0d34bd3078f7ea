"""`fenced`: which tool takes the code, and fences inside of it. The rest is in the corpus."""

from __future__ import annotations

import pytest

from polyturn.rendering.tool_calls import ToolCall, call_format
from unit.rendering.tool_calls.forms import LOOK, PYTHON, TEXT, tool

BLOCK = "```python\nprint(1)\n```"
RUN = tool("run", ["code"], code=TEXT)


@pytest.mark.parametrize(
    ("specs", "name"), [((), "python"), ((PYTHON,), "python"), ((LOOK, RUN, PYTHON), "run"), ((LOOK,), None)], ids=str
)
def test_the_code_tool_is_the_first_that_takes_code(specs, name):
    found = call_format("fenced", specs).parse(BLOCK)
    if name is None:
        assert found.calls == ()
        assert found.text == BLOCK
    else:
        assert found.calls == (ToolCall(name=name, arguments={"code": "print(1)"}),)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"code": "print(1)"}, BLOCK),
        ({"code": '"""\n```\nx\n```\n"""'}, '````python\n"""\n```\nx\n```\n"""\n````'),
        ({"code": ""}, '```json\n{"name": "python", "arguments": {"code": ""}}\n```'),
        ({"code": 5}, '```json\n{"name": "python", "arguments": {"code": 5}}\n```'),
        ({}, '```json\n{"name": "python", "arguments": {}}\n```'),
    ],
)
def test_what_is_written(arguments, text):
    form = call_format("fenced")
    assert form.write("python", arguments) == text
    assert form.parse(text).calls == (ToolCall(name="python", arguments=arguments),)


def test_a_fence_inside_of_a_line_closes_nothing():
    code = "x = '''```'''\nprint(x)"
    assert call_format("fenced").parse(f"```python\n{code}\n```").calls == (ToolCall(name="python", arguments={"code": code}),)


def test_both_ways_are_told():
    text = call_format("fenced", [LOOK, PYTHON]).instructions([LOOK, PYTHON])
    assert "To call python, write a Python code block, which is its argument code:\n```python\nprint(3 * (4 + 5))\n```" in text
    assert 'To call another, write a JSON code block with its name and arguments:\n```json\n{"name": "look", ' in text
