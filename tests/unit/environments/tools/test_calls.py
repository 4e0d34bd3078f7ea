"""A call held against the tools that there are."""

from __future__ import annotations

import pytest

from polyturn.environments.tools.calls import read_call, refuse_bad_schema
from polyturn.errors import EnvironmentSetupError
from polyturn.rendering.tool_calls import MalformedCall, ToolCall, ToolSpec

BOOK = ToolSpec(
    name="book",
    description="Book seats.",
    parameters={
        "type": "object",
        "properties": {
            "train": {"type": "string"},
            "seats": {"type": "integer", "minimum": 1},
            "names": {"type": "array", "items": {"type": "object", "properties": {"first": {}}, "required": ["first"]}},
        },
        "required": ["train"],
    },
)
NOW = ToolSpec(name="now", description="The time.", parameters={"type": "object", "properties": {}})


@pytest.mark.parametrize(
    "arguments", [{"train": "12"}, {"train": "12", "seats": 2}, {"train": "", "names": [{"first": "A"}, {"first": None}]}]
)
def test_a_call_that_fits_is_given_back(arguments):
    call = ToolCall(name="book", arguments=arguments)
    assert read_call(call, [NOW, BOOK]) is call


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("bok", {}, "there is no tool 'bok'; did you mean book?"),
        ("x" * 1000, {}, f"there is no tool '{'x' * 40}'; valid: book, now"),
        ("book", {}, "book needs the argument train"),
        ("book", {"train": "1", "seat": 2}, "book has no argument 'seat'; did you mean seats?"),
        ("now", {"zone": "utc"}, "now has no argument 'zone'; it takes none"),
        ("book", {"train": 7}, "the argument train of book: 7 is not of type 'string'"),
        ("book", {"train": "1", "seats": 0}, "the argument seats of book: 0 is less than the minimum of 1"),
        ("book", {"train": "1", "seats": True}, "the argument seats of book: True is not of type 'integer'"),
        ("book", {"train": "1", "names": [{"first": 1}, {}]}, "book needs the argument names[1].first"),
    ],
)
def test_a_call_that_does_not_fit_says_why(name, arguments, problem):
    read = read_call(ToolCall(name=name, arguments=arguments), [BOOK, NOW])
    assert read == MalformedCall(problem=problem)


def test_what_could_not_be_read_stays_as_it_is():
    call = MalformedCall(problem="half a call")
    assert read_call(call, [BOOK]) is call


def test_a_problem_stays_short_whatever_the_model_wrote():
    read = read_call(ToolCall(name="book", arguments={"train": ["x" * 100_000]}), [BOOK])
    assert isinstance(read, MalformedCall)
    assert len(read.problem) < 300


def test_two_tools_of_one_name_in_two_environments_do_not_share_a_schema():
    other = ToolSpec(name="book", description="", parameters={"type": "object", "properties": {"title": {"type": "string"}}})
    assert isinstance(read_call(ToolCall(name="book", arguments={"title": "x"}), [other]), ToolCall)
    assert isinstance(read_call(ToolCall(name="book", arguments={"title": "x"}), [BOOK]), MalformedCall)


def test_additional_arguments_where_the_schema_takes_them():
    open_ended = ToolSpec(
        name="log", description="", parameters={"type": "object", "additionalProperties": {"type": "integer"}}
    )
    assert isinstance(read_call(ToolCall(name="log", arguments={"a": 1}), [open_ended]), ToolCall)
    assert isinstance(read_call(ToolCall(name="log", arguments={"a": "x"}), [open_ended]), MalformedCall)


@pytest.mark.parametrize("parameters", [{"type": "object", "properties": 3}, {"type": "array"}, {"type": "nonsense"}])
def test_a_schema_that_is_none_is_refused_at_start(parameters):
    with pytest.raises(EnvironmentSetupError, match="tool broken"):
        refuse_bad_schema(ToolSpec(name="broken", description="", parameters=parameters))
    refuse_bad_schema(BOOK)
