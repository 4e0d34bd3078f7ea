"""Tool calls in a reply, in the form of the Hermes models: JSON between tags.

    <tool_call>{"name": "calculator", "arguments": {"expression": "3*(4+5)"}}</tool_call>

Reading is tolerant where the meaning is plain: white space, a code fence around the JSON, `parameters` for `arguments`,
arguments given as a JSON string, a last call whose closing tag is missing. What can't be read is returned with the reason, for
the model to see.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyturn.types import Json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_FENCE_OPEN = re.compile(r"```(?:json)?\s*")
_FENCE_CLOSE = re.compile(r"\s*```")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that could be read."""

    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A call that could not; `problem` says what is wrong with it, in words for the model."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as a model is told of it: `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str
    parameters: Mapping[str, Json]

    def as_json(self) -> dict[str, Json]:
        """In the form that chat templates take."""
        function: Json = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """The calls of a reply in order, and the text around them.

    >>> parse_tool_calls('Hm. <tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>').calls
    (ToolCall(name='look', arguments={'at': 'x'}),)
    """

    text: str
    calls: tuple[ToolCall | MalformedCall, ...]


def format_tool_call(name: str, arguments: Mapping[str, Json]) -> str:
    """The text of a call, as `parse_tool_calls` reads it."""
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}{CLOSE}"


def parse_tool_calls(reply: str, *, truncated: bool = False) -> ParsedReply:
    """Find the calls in `reply`. With `truncated` a last call without its closing tag is malformed, whatever it holds."""
    text: list[str] = []
    calls: list[ToolCall | MalformedCall] = []
    position = 0
    while (start := reply.find(OPEN, position)) >= 0:
        text.append(reply[position:start])
        call, position = _call(reply, start + len(OPEN), truncated)
        calls.append(call)
    text.append(reply[position:])
    return ParsedReply(text="".join(text), calls=tuple(calls))


def _call(reply: str, start: int, truncated: bool) -> tuple[ToolCall | MalformedCall, int]:
    """The call whose body starts at `start`, and where the text goes on."""
    fence = _FENCE_OPEN.match(reply, _skip(_SPACE, reply, start))
    body = fence.end() if fence else _skip(_SPACE, reply, start)
    try:
        value, end = _DECODER.raw_decode(reply, body)
    except (ValueError, RecursionError) as error:
        # The JSON does not say where it ends, so the next tag does.
        ends = [at for tag in (CLOSE, OPEN) if (at := reply.find(tag, start)) >= 0]
        end = min(ends, default=len(reply))
        after = end + len(CLOSE) if reply.startswith(CLOSE, end) else end
        if truncated and not ends:
            return _unfinished(), after
        return MalformedCall(problem=f"the call is not valid JSON: {_reason(error, body)}"), after
    if fence:
        end = _skip(_FENCE_CLOSE, reply, end)
    end = _skip(_SPACE, reply, end)
    if reply.startswith(CLOSE, end):
        return _checked(value), end + len(CLOSE)
    if end == len(reply) or (truncated and CLOSE.startswith(reply[end:])):
        return (_unfinished() if truncated else _checked(value)), len(reply)
    close = reply.find(CLOSE, end)
    after = len(reply) if close < 0 else close + len(CLOSE)
    return MalformedCall(problem=f"after the JSON of the call stands {reply[end : end + 20]!r}, not {CLOSE}"), after


def _checked(value: Any) -> ToolCall | MalformedCall:
    if not isinstance(value, dict):
        return MalformedCall(problem=f"the call is a JSON {_kind(value)}, not an object with name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(problem="the call has no name; it needs a name and arguments")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return MalformedCall(problem=f"the arguments of the call are not valid JSON: {_reason(error, 0)}")
    if not isinstance(arguments, dict):
        found = "missing" if arguments is None else f"a JSON {_kind(arguments)}"
        return MalformedCall(problem=f"the arguments of the call are {found}; they must be an object")
    return ToolCall(name=name, arguments=arguments)


def _unfinished() -> MalformedCall:
    return MalformedCall(problem=f"the call was cut off before {CLOSE}")


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


def _reason(error: Exception, start: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.lower()} at character {error.pos - start + 1}"
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def _kind(value: Any) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return kinds.get(type(value), "object")
