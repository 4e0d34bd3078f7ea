"""JSON inside of a reply: the same values as `json`, where that is strict; an end for each; words for the rest."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polyturn.rendering.tool_calls.json_text import MAX_DEPTH, MAX_DIGITS, JsonProblem, read_text, read_value, write_value
from polyturn.rendering.tool_calls.source import whole
from unit.rendering.tool_calls.forms import values

PIECES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    '"a"',
    '"b"',
    "\\n",
    "\\u00e9",
    "1",
    "-0",
    ".5",
    "1.5",
    "e3",
    "true",
    "null",
    " ",
    "\n",
]


def problem(text):
    with pytest.raises(JsonProblem) as caught:
        read_text(text)
    return caught.value.said(0)


@given(values, st.sampled_from([None, 2]))
def test_values_come_back(value, indent):
    assert read_text(json.dumps(value, indent=indent)) == value
    assert read_text(write_value(value)) == value
    assert "\n" not in write_value(value)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example("1e311")
@example('{"a":1e311,"a":1}')
def test_it_agrees_with_json(text):
    """On what is JSON, and on the value; a key that stands twice and a number that no float holds apart."""
    floats = []
    try:
        expected = json.loads(text, parse_float=lambda digits: floats.append(float(digits)) or floats[-1])
    except ValueError:
        problem(text)
        return
    if math.inf in map(abs, floats):
        assert "is too large" in problem(text)
        return
    try:
        assert read_text(text) == expected
    except JsonProblem as refused:
        assert "stands twice" in refused.words  # noqa: PT017 - whether it raises depends on the text


@given(values, st.text())
def test_where_a_value_ends(value, after):
    text = json.dumps([value])
    assert whole(f"ab{text}{after}", lambda source: read_value(source, 2)) == ([value], 2 + len(text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expecting value at character 1"),
        ("nul", "expecting value at character 1"),
        ("[1, ]", "expecting value at character 5"),
        ("[1 2]", "expecting ',' delimiter at character 4"),
        ('{"a"}', "expecting ':' delimiter at character 5"),
        ("{a: 1}", "expecting property name enclosed in double quotes at character 2"),
        ('{"a": 1,}', "expecting property name enclosed in double quotes at character 9"),
        ('["a', "unterminated string that starts at character 2"),
        ('["a\\', "unterminated string that starts at character 2"),
        ('["\\u00e', "invalid \\escape in a string at character 3"),
        ('["\t"]', "invalid control character in a string at character 3"),
        ("[+1]", "'+1' is no number at character 2"),
        ("[1.]", "'1.' is no number at character 2"),
        ("[-]", "'-' is no number at character 2"),
        ("[Infinity]", "Infinity is no JSON number at character 2"),
        ("[1e400]", "the number 1e400 is too large"),
        ("9" * (MAX_DIGITS + 1), f"a number of more than {MAX_DIGITS} digits at character 1"),
        ("[" * (MAX_DEPTH + 1), f"nested too deep, more than {MAX_DEPTH} levels at character {MAX_DEPTH + 1}"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' stands twice in an object"),
        ('["\\udc00"]', "half of a surrogate pair, which is no character"),
        ("1 2", "unexpected text after the value at character 3"),
    ],
)
def test_what_is_wrong_is_said(text, said):
    assert problem(text) == said


def test_the_limits_themselves_are_allowed():
    assert read_text("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert read_text("9" * MAX_DIGITS) == int("9" * MAX_DIGITS)
    assert read_text('"\\ud83d\\ude42"') == "🙂"
