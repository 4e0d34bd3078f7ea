"""What holds for every form of calls."""

from __future__ import annotations

import doctest
import json
import re
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.errors import ConfigError
from polyturn.programs import fenced_blocks
from polyturn.rendering import tool_calls
from polyturn.rendering.tool_calls import CALL_FORMATS, MalformedCall, ParsedReply, ToolCall, ToolSpec, call_format, fenced
from polyturn.rendering.tool_calls.source import Source
from unit.rendering.tool_calls.forms import FORMS, LOOK, MARKS, PYTHON, SPECS, calls, replies

CORPUS = [
    json.loads(line)
    for line in (Path(__file__).parents[3] / "data" / "tool_calls" / "malformed.jsonl").read_text(encoding="utf-8").splitlines()
]
X = ToolCall(name="look", arguments={"at": "x"})


def in_pieces(form, pieces, truncated):
    """What a reader makes of a reply in pieces. Calls must be told as soon as they are found, in order, once."""
    reader, told = form.reader(), []
    for piece in pieces:
        told += reader.feed(piece)
    found = reader.finish(truncated)
    assert found.calls[: len(told)] == tuple(told)
    return found


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: f"{case['family']}:{case['reply'][:40]}")
def test_the_corpus(case):
    form = FORMS[case["family"]]
    found = form.parse(case["reply"], truncated=case["truncated"])
    assert len(found.calls) == len(case["expected"]), found
    for call, expected in zip(found.calls, case["expected"], strict=True):
        if "call" in expected:
            name, arguments = expected["call"]
            assert call == ToolCall(name=name, arguments=arguments)
        else:
            assert isinstance(call, MalformedCall)
            assert expected["problem"] in call.problem
    if "text" in case:
        assert found.text == case["text"]
    assert in_pieces(form, case["reply"], case["truncated"]) == found


def test_the_corpus_covers_every_family_in_both_ways():
    for name in CALL_FORMATS:
        cases = [case for case in CORPUS if case["family"] == name]
        assert len(cases) > 15
        assert {case["truncated"] for case in cases} == {True, False}


@pytest.mark.parametrize("name", CALL_FORMATS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_what_is_written_is_read(name, data):
    form = FORMS[name]
    called = data.draw(st.lists(calls(name), min_size=1, max_size=3))
    reply = form.separator.join(form.write(*call) for call in called)
    expected = ParsedReply(
        text=form.separator * (len(called) - 1) * (name not in ("llama3",)),
        calls=tuple(ToolCall(name=tool, arguments=arguments) for tool, arguments in called),
    )
    truncated = data.draw(st.booleans())
    assert form.parse(reply, truncated=truncated) == expected
    assert in_pieces(form, reply, truncated) == expected


@pytest.mark.parametrize("name", CALL_FORMATS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_reply_in_pieces_is_the_whole_reply_and_nothing_raises(name, data):
    reply = data.draw(replies(name))
    truncated = data.draw(st.booleans())
    whole = FORMS[name].parse(reply, truncated=truncated)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=8)))
    pieces = [reply[start:end] for start, end in zip([0, *cuts], [*cuts, len(reply)], strict=True)]
    assert in_pieces(FORMS[name], pieces, truncated) == whole
    assert in_pieces(FORMS[name], reply, truncated) == whole
    assert len(whole.text) <= len(reply)
    if not whole.calls:
        assert whole.text == reply


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_call_is_told_as_soon_as_it_is_whole(name):
    reader = FORMS[name].reader()
    text = FORMS[name].write("look", {"at": "x"})
    late = {"fenced": "\n", "mistral": ""}.get(name, "")  # a line ends at its break
    cut = text.rindex("}") if name == "mistral" else len(text) - 1
    assert reader.feed(f"So: \n{text[:cut]}") == ()
    assert reader.feed(text[cut:] + late) == (X,)
    assert reader.feed("more") == ()
    assert reader.finish().text == f"So: \n{late}more"


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_reader_is_for_one_reply(name):
    reader = FORMS[name].reader()
    reader.finish()
    with pytest.raises(AssertionError, match="was fed"):
        reader.feed("x")
    with pytest.raises(AssertionError, match="finished twice"):
        reader.finish()


HOSTILE = ['{"a":[', '"', "\\", "{", "[", '{"name": "', '[{"name":1},', " ", "\n", "9", "é", '{"arguments":', '{"a": "', "`"]


@pytest.fixture
def looked_at(monkeypatch):
    """A list whose sum is the number of characters that formats have looked at."""
    seen: list[int] = []

    def counted(method):
        def count(self, what, start):
            result = yield from method(self, what, start)
            end = len(self.text) if result is None else result[1] if isinstance(result, tuple) else result
            seen.append(1 if isinstance(result, bool) else 1 + end - start)
            return result

        return count

    def blocks(text):
        seen.append(len(text))
        return fenced_blocks(text)

    for name in ("find", "run", "starts"):
        monkeypatch.setattr(Source, name, counted(getattr(Source, name)))
    monkeypatch.setattr(fenced, "fenced_blocks", blocks)
    return seen


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_hostile_replies_take_time_in_proportion_to_their_length(name, looked_at):
    units = [*MARKS[name], *HOSTILE, *(mark + unit for mark in MARKS[name] for unit in HOSTILE)]
    for unit in units:
        for start in ("", MARKS[name][0]):
            reply = start + unit * (6_000 // len(unit))
            looked_at.clear()
            FORMS[name].parse(reply, truncated=bool(start))
            assert sum(looked_at) <= 20 * len(reply), unit


LARGE = 400_000


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_large_reply_in_small_pieces_ends(name):
    text = FORMS[name].write("look", {"at": "x " * (LARGE // 2)})
    pieces = [text[at : at + 16] for at in range(0, len(text), 16)]
    (call,) = in_pieces(FORMS[name], pieces, False).calls
    assert len(call.arguments["at"]) == LARGE


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_instructions_name_the_tools_and_show_a_call_that_works(name):
    specs = [*SPECS, PYTHON]
    form = call_format(name, specs)
    text = form.instructions(specs)
    for spec in specs:
        assert spec.name in text
        assert spec.description in text
    found = form.parse(text[text.index("To call") :]).calls
    shown = [call for call in found if isinstance(call, ToolCall)]
    assert shown, text
    assert {call.name for call in shown} <= {spec.name for spec in specs}
    assert form.instructions([]) == ""


def test_instructions_in_full():
    assert call_format("hermes").instructions([LOOK]) == (
        "You have these tools:\n"
        "- look: This is look.\n"
        '  arguments: {"type": "object", "properties": {"at": {"type": "string"}, "depth": {"type": "integer"}}, '
        '"required": ["at"]}\n'
        "To call one, write a JSON object with its name and arguments between <tool_call> and </tool_call>:\n"
        '<tool_call>{"name": "look", "arguments": {"at": "..."}}</tool_call>\n'
        "You may make several calls in a reply. Then wait for their results."
    )
    assert call_format("xml", [LOOK]).instructions([LOOK]) == (
        "You have these tools:\n"
        "- look: This is look.\n"
        "  at: string, required\n"
        "  depth: integer, optional\n"
        "To call one, write its tag with the arguments inside:\n"
        "<look>...</look>\n"
        "You may make several calls in a reply. Then wait for their results."
    )


def test_an_unknown_name():
    with pytest.raises(ConfigError, match=r"'hermis' is no format of tool calls; did you mean hermes\?"):
        call_format("hermis")


def test_a_spec_is_what_templates_take():
    spec = ToolSpec(name="look", description="Look.", parameters={"type": "object"})
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    assert spec.as_json() == {"type": "function", "function": function}


def test_the_documented_examples():
    for module in (tool_calls.base, tool_calls.registry):
        assert doctest.testmod(module).failed == 0


def test_the_examples_of_the_page_are_calls():
    """Every indented example under the heading of a format; nothing of it is text or malformed."""
    page = (Path(__file__).parents[4] / "docs" / "tool_calls.md").read_text(encoding="utf-8")
    for name in CALL_FORMATS:
        section = page.split(f"\n### {name}\n")[1].split("\n#")[0]
        for block in re.findall(r"(?:^    .*\n)+", section, re.MULTILINE):
            found = FORMS[name].parse(textwrap.dedent(block))
            assert all(call in (X, ToolCall(name="python", arguments={"code": "print(3 * (4 + 5))"})) for call in found.calls)
            assert len(found.calls) >= 1
            assert not found.text.strip()
