"""`hermes`: JSON between tags, as the Hermes and Qwen models write calls.

    <tool_call>{"name": "calculator", "arguments": {"expression": "3*(4+5)"}}</tool_call>

Reading is tolerant where the meaning is plain: white space, a code fence around the JSON, `parameters` for `arguments`,
arguments given as a JSON string, a last call whose closing tag is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyturn.rendering.tool_calls.base import ParsedReply, ToolSpec
from polyturn.rendering.tool_calls.json_text import call_of, write_value
from polyturn.rendering.tool_calls.prompts import example_arguments, told
from polyturn.rendering.tool_calls.source import Source, SourceReader, Steps, Tags, parsed
from polyturn.rendering.tool_calls.tagged import read_tagged
from polyturn.types import Json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPENING, _STOPS = Tags(OPEN), Tags(OPEN, CLOSE)


class Hermes:
    """See the top of the module."""

    name = "hermes"
    separator = "\n"

    def parse(self, reply: str, *, truncated: bool = False) -> ParsedReply:
        """See `CallFormat.parse`."""
        return parsed(self.reader(), reply, truncated)

    def reader(self) -> SourceReader:
        """See `CallFormat.reader`."""
        return SourceReader(_read)

    def write(self, name: str, arguments: Mapping[str, Json]) -> str:
        """See `CallFormat.write`."""
        return f"{OPEN}{write_value({'name': name, 'arguments': arguments})}{CLOSE}"

    def instructions(self, specs: Sequence[ToolSpec]) -> str:
        """See `CallFormat.instructions`."""
        if not specs:
            return ""
        how = f"To call one, write a JSON object with its name and arguments between {OPEN} and {CLOSE}:"
        return told(specs, how, self.write(specs[0].name, example_arguments(specs[0])))


def _read(source: Source) -> Steps[None]:
    position = 0
    while (found := (yield from source.find(_OPENING, position))) is not None:
        source.say(position, found[1])
        position = yield from read_tagged(source, found[1] + len(OPEN), close=CLOSE, stops=_STOPS, make=call_of)
    source.say(position, len(source.text))
