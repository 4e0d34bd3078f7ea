"""`llama3`: what is a call in a text that may hold other JSON. The rest is in the corpus."""

from __future__ import annotations

import json

import pytest

from polyturn.rendering.tool_calls import MalformedCall, ToolCall, call_format

LLAMA = call_format("llama3")
X = ToolCall(name="look", arguments={"at": "x"})
CALL = '{"name": "look", "parameters": {"at": "x"}}'


def test_what_is_written():
    assert LLAMA.write("look", {"at": "x"}) == CALL


@pytest.mark.parametrize("text", ['{"a": 1}', "{}", "{x}", '{"name": "Bob"}', "{{", "f'{x!r}'", '{"a"', '{"type": "object", }'])
def test_other_json_is_text(text):
    found = LLAMA.parse(f"{text} {CALL}")
    assert found.calls == (X,)
    assert found.text == f"{text} "


def test_json_with_arguments_inside_of_other_json_that_is_broken_is_still_a_problem_the_model_hears_of():
    (call,) = LLAMA.parse('{"call": {"name": "look", "parameters": {"at": }}}').calls
    assert isinstance(call, MalformedCall)


def test_a_broken_call_ends_at_the_next_token_not_inside_of_its_own_arguments():
    inner = '{"name": "delete", "parameters": {}}'
    found = LLAMA.parse(f'{{"name": "look" "parameters": {inner}}} <|python_tag|>{CALL}')
    assert [type(call) for call in found.calls] == [MalformedCall, ToolCall]
    assert found.calls[1] == X


def test_tags_in_arguments_end_nothing():
    text = "a </function> <function=x>{} <|python_tag|> ; {"
    call = ToolCall(name="say", arguments={"text": text})
    assert LLAMA.parse(LLAMA.write("say", {"text": text})).calls == (call,)
    assert LLAMA.parse(f"<function=say>{json.dumps({'text': text})}</function>").calls == (call,)
