"""`mistral`: lists, names and tokens that may be missing. The rest is in the corpus."""

from __future__ import annotations

import pytest

from polyturn.rendering.tool_calls import MalformedCall, ToolCall, call_format

MISTRAL = call_format("mistral")
X, Y = (ToolCall(name="look", arguments={"at": at}) for at in "xy")
LIST = '[{"name": "look", "arguments": {"at": "x"}}, {"name": "look", "arguments": {"at": "y"}}]'
FIRST = LIST.index(", {")


def test_what_is_written():
    assert MISTRAL.write("look", {"at": "x"}) == '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "x"}}]'


@pytest.mark.parametrize(
    "reply",
    [
        f"[TOOL_CALLS] {LIST}",
        f"[TOOL_CALLS]{LIST}",
        f"[TOOL_CALLS]\n{LIST}\n",
        LIST,
        '[TOOL_CALLS]look[ARGS]{"at": "x"}[TOOL_CALLS]look[ARGS]{"at": "y"}',
        '[TOOL_CALLS]look[ARGS]{"at": "x"}look[ARGS]{"at": "y"}',
        'look[ARGS]{"at": "x"} look[CALL_ID]abc123XYZ[ARGS]{"at": "y"}',
        '[TOOL_CALLS]look{"at": "x"}[TOOL_CALLS]look {"at": "y"}',
        f"[TOOL_CALLS] {LIST[:FIRST]} [TOOL_CALLS] [{LIST[FIRST + 2 :]}",
    ],
)
def test_forms_that_mean_the_same(reply):
    found = MISTRAL.parse(reply)
    assert found.calls == (X, Y)
    assert not found.text.strip(" \n")


def test_a_call_of_a_list_is_told_before_the_list_ends():
    reader = MISTRAL.reader()
    assert reader.feed(f"[TOOL_CALLS] {LIST[:FIRST]}") == (X,)
    assert reader.feed(LIST[FIRST:-1]) == (Y,)
    assert reader.finish().calls == (X, Y)


def test_a_broken_list_is_lost_up_to_the_next_token():
    found = MISTRAL.parse(f"[TOOL_CALLS] [{{]{LIST}[TOOL_CALLS] {LIST}")
    assert [type(call) for call in found.calls] == [MalformedCall, ToolCall, ToolCall]


def test_a_name_is_looked_for_right_before_its_token():
    (call,) = MISTRAL.parse("I call " + "look" * 100 + '[ARGS]{"at": "x"}').calls
    assert call.name == "look" * 50
    (call,) = MISTRAL.parse('look [ARGS]{"at": "x"}').calls
    assert call == MalformedCall(problem="there is no name before [ARGS]")
