"""`llama3`: JSON objects, as Llama 3.1 and 3.2 write calls of their own accord, several separated by semicolons.

    {"name": "calculator", "parameters": {"expression": "3*(4+5)"}}
    <|python_tag|>{"name": "look", "parameters": {"at": "x"}}; {"name": "look", "parameters": {"at": "y"}}
    <function=look>{"at": "x"}</function>

All three are read, the first is written. Without the token, an object in the text is a call when it has `parameters` (or
`arguments`); behind the token anything must be one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from polyturn.rendering.tool_calls.bare import read_object
from polyturn.rendering.tool_calls.base import Call, MalformedCall, ParsedReply, ToolSpec
from polyturn.rendering.tool_calls.json_text import named_call, write_value
from polyturn.rendering.tool_calls.prompts import example_arguments, told
from polyturn.rendering.tool_calls.source import Source, SourceReader, Steps, Tags, parsed, shown
from polyturn.rendering.tool_calls.tagged import cut_off, read_tagged
from polyturn.types import Json

TAG, FUNCTION, CLOSE = "<|python_tag|>", "<function=", "</function>"
KEY = "parameters"
_OPENINGS, _STOPS, _FUNCTION_STOPS = Tags(TAG, FUNCTION, "{"), Tags(TAG, FUNCTION), Tags(TAG, FUNCTION, CLOSE)
_NAME = re.compile(r"[^<>{\n]*")


class Llama3:
    """See the top of the module."""

    name = "llama3"
    separator = "; "

    def parse(self, reply: str, *, truncated: bool = False) -> ParsedReply:
        """See `CallFormat.parse`."""
        return parsed(self.reader(), reply, truncated)

    def reader(self) -> SourceReader:
        """See `CallFormat.reader`."""
        return SourceReader(_read)

    def write(self, name: str, arguments: Mapping[str, Json]) -> str:
        """See `CallFormat.write`."""
        return write_value({"name": name, KEY: arguments})

    def instructions(self, specs: Sequence[ToolSpec]) -> str:
        """See `CallFormat.instructions`."""
        if not specs:
            return ""
        how = f"To call one, write a JSON object with its name and its arguments as {KEY}; put a semicolon between two calls:"
        return told(specs, how, self.write(specs[0].name, example_arguments(specs[0])))


def _read(source: Source) -> Steps[None]:
    position = start = 0
    while (found := (yield from source.find(_OPENINGS, start))) is not None:
        tag, at = found
        if tag == FUNCTION:
            end, called = (yield from _function(source, at + len(FUNCTION))), True
        else:
            body = at if tag == "{" else (yield from source.space(at + len(TAG)))
            end, called = yield from read_object(source, body, key=KEY, stops=_STOPS, announced=tag == TAG)
        start = end
        if called:
            source.say(position, at)
            position = start = yield from _after(source, end)
    source.say(position, len(source.text))


def _after(source: Source, end: int) -> Steps[int]:
    """Past the semicolon between two calls, or after the last one."""
    at = yield from source.space(end)
    if not (yield from source.starts(";", at)):
        return end
    at = yield from source.space(at + 1)
    following = yield from source.which((TAG, FUNCTION, "{"), at)
    return at if following or at == len(source.text) else end


def _function(source: Source, start: int) -> Steps[int]:
    """A call in tags that hold the name. Some models leave out the `>` behind it."""
    end = yield from source.run(_NAME, start)
    name = source.text[start:end].strip()
    mark = yield from source.which((">", "{"), end)
    if mark is not None:
        body = end + (mark == ">")
        return (yield from read_tagged(source, body, close=CLOSE, stops=_FUNCTION_STOPS, make=lambda value: _call(name, value)))
    found = yield from source.find(_FUNCTION_STOPS, end)
    stop = len(source.text) if found is None else found[1]
    if found is None and source.truncated:
        source.calls.append(cut_off(CLOSE))
    else:
        problem = f"after {FUNCTION}{name[:40]} stands {shown(source.text, end, stop)}, not > and the {KEY}"
        source.calls.append(MalformedCall(problem=problem))
    return stop + len(CLOSE) if found is not None and found[0] == CLOSE else stop


def _call(name: str, value: Json) -> Call:
    return named_call(name, value, KEY) if name else MalformedCall(problem=f"there is no name after {FUNCTION}")
