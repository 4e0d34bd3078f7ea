"""`hermes`: what is found, what is tolerated, and what is said about the rest."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.rendering.tool_calls import MalformedCall, ToolCall, call_format
from polyturn.rendering.tool_calls.hermes import CLOSE, OPEN

HERMES = call_format("hermes")
LOOK = ToolCall(name="look", arguments={"at": "x"})
BODY = '{"name": "look", "arguments": {"at": "x"}}'


def calls(reply: str, **options: bool):
    return HERMES.parse(reply, **options).calls


def problem(reply: str, **options: bool) -> str:
    (call,) = calls(reply, **options)
    assert isinstance(call, MalformedCall)
    return call.problem


@pytest.mark.parametrize(
    "reply",
    [
        f"{OPEN}{BODY}{CLOSE}",
        f"{OPEN}\n  {BODY}\n{CLOSE}",
        f"{OPEN}```json\n{BODY}\n```{CLOSE}",
        f"{OPEN}\n```\n{BODY}```\n{CLOSE}",
        f"{OPEN}{BODY}",
        f"{OPEN}{BODY}\n ",
        f'{OPEN}{{"name": "look", "parameters": {{"at": "x"}}}}{CLOSE}',
        f'{OPEN}{{"arguments": "{{\\"at\\": \\"x\\"}}", "name": "look", "id": 7}}{CLOSE}',
    ],
)
def test_forms_that_mean_the_same(reply):
    assert calls(reply) == (LOOK,)


def test_text_and_several_calls():
    found = HERMES.parse(f"First {OPEN}{BODY}{CLOSE} then {OPEN}[]{CLOSE}{OPEN}{BODY}{CLOSE} done")
    assert found.text == "First  then  done"
    assert found.calls == (LOOK, MalformedCall(problem="the call is a JSON array, not an object with name and arguments"), LOOK)


def test_no_call():
    assert HERMES.parse("just text </tool_call>") == HERMES.parse("just text </tool_call>", truncated=True)
    assert HERMES.parse("just text </tool_call>").text == "just text </tool_call>"
    assert calls("") == ()


def test_tags_inside_of_a_string_end_nothing():
    inside = f"a {CLOSE} b {OPEN} c"
    reply = HERMES.write("say", {"text": inside})
    assert calls(f"{reply} {reply}") == (ToolCall(name="say", arguments={"text": inside}),) * 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"name": "look", "arguments": {"at": }}', "not valid JSON: expecting value at character 38"),
        ("{'name': 'look'}", "not valid JSON: expecting property name enclosed in double quotes at character 2"),
        ("look(x)", "not valid JSON: expecting value at character 1"),
        ("", "not valid JSON: expecting value at character 1"),
        ("[" * 100_000, "nested too deep"),
        ("9" * 5000, "not valid JSON"),
        ('"look"', "a JSON string, not an object with name and arguments"),
        ("3", "a JSON number, not an object"),
        ("true", "a JSON boolean, not an object"),
        ("null", "a JSON null, not an object"),
        ('{"arguments": {}}', "has no name"),
        ('{"name": "", "arguments": {}}', "has no name"),
        ('{"name": 3, "arguments": {}}', "has no name"),
        ('{"name": "look"}', "the arguments of the call are missing; they must be an object"),
        ('{"name": "look", "arguments": [1]}', "the arguments of the call are a JSON array; they must be an object"),
        (
            '{"name": "look", "arguments": "at x"}',
            "the arguments of the call are not valid JSON: expecting value at character 1",
        ),
        (f"{BODY} please", "after the JSON of the call stands 'please"),
    ],
)
def test_what_is_wrong_is_said(body, said):
    assert said in problem(f"so {OPEN}{body}{CLOSE} end")


def test_after_a_malformed_call_the_text_goes_on():
    found = HERMES.parse(f"{OPEN}{{{CLOSE}between{OPEN}{BODY}{CLOSE}")
    assert found.text == "between"
    assert found.calls[1] == LOOK
    unclosed = HERMES.parse(f"{OPEN}oops {OPEN}{BODY}{CLOSE}")
    assert unclosed.calls[1] == LOOK


@pytest.mark.parametrize("cut", [f"{OPEN}{BODY[:-3]}", f"{OPEN}{BODY}", OPEN, f"{OPEN}{BODY}</tool"])
def test_half_a_call_is_not_taken_for_a_whole_one(cut):
    whole = f"{OPEN}{BODY}{CLOSE}"
    assert calls(whole + cut, truncated=True) == (LOOK, MalformedCall(problem="the call was cut off before </tool_call>"))


# ── properties ─────────────────────────────────────────────────────────────────────────────────────────────────────────

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(), values, max_size=3)
texts = st.text().filter(lambda text: OPEN not in text and "<" not in text)


@given(st.lists(st.tuples(texts, st.text(min_size=1), arguments), max_size=3), texts, st.booleans())
def test_what_is_formatted_is_parsed_whatever_stands_around_it(pieces, end, truncated):
    reply = "".join(text + HERMES.write(name, given_) for text, name, given_ in pieces) + end
    found = HERMES.parse(reply, truncated=truncated)
    assert found.calls == tuple(ToolCall(name=name, arguments=given_) for _, name, given_ in pieces)
    assert found.text == "".join(text for text, _, _ in pieces) + end


@given(
    st.lists(st.sampled_from([OPEN, CLOSE, BODY, "{", "}", '"', "```", " ", "\n", "text", "[1]"]), max_size=12), st.booleans()
)
def test_no_reply_is_too_strange(pieces, truncated):
    reply = "".join(pieces)
    found = HERMES.parse(reply, truncated=truncated)
    assert len(found.calls) <= reply.count(OPEN)
    assert bool(found.calls) == (OPEN in reply)
    assert len(found.text) <= len(reply)


@given(arguments)
def test_the_format_is_json_between_tags(given_):
    text = HERMES.write("look", given_)
    assert json.loads(text.removeprefix(OPEN).removesuffix(CLOSE)) == {"name": "look", "arguments": given_}
