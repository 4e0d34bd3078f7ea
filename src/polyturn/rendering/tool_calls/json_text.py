"""JSON inside of a reply: where a value ends, what it is, and what is wrong with it, in words for a model.

Stricter than `json`: no NaN, no infinite numbers, no key twice in an object, no half of a surrogate pair, at most `MAX_DEPTH`
levels.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from polyturn.rendering.tool_calls.base import Call, MalformedCall, ToolCall
from polyturn.rendering.tool_calls.source import Source, Steps, whole
from polyturn.types import Json

MAX_DEPTH = 100
MAX_DIGITS = 1000
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_NUMERIC = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LITERALS = ("true", "false", "null")
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
_WANTED = {
    "value": "expecting value",
    "first value": "expecting value",
    "key": "expecting property name enclosed in double quotes",
    "first key": "expecting property name enclosed in double quotes",
    ":": "expecting ':' delimiter",
    ",": "expecting ',' delimiter",
}


class JsonProblem(Exception):
    """What is wrong with a value, where in the reply (None for somewhere in the value), and where reading stopped."""

    def __init__(self, words: str, at: int | None = None, stop: int | None = None) -> None:
        super().__init__(words)
        self.words = words
        self.at = at
        self.stop = stop if stop is not None else at or 0

    def said(self, start: int) -> str:
        """With its place, counted from `start`."""
        return self.words if self.at is None else f"{self.words} at character {self.at - start + 1}"


def read_value(source: Source, start: int) -> Steps[tuple[Json, int]]:
    """The value that starts there and where it ends. Raises JsonProblem."""
    end = yield from _end_of_value(source, start)
    try:
        return _value(source.text[start:end]), end
    except JsonProblem as problem:
        problem.stop = end
        raise


def read_text(text: str) -> Json:
    """The value that is all of `text`. Raises JsonProblem."""
    start = len(text) - len(text.lstrip())
    value, end = whole(text, lambda source: read_value(source, start))
    rest = text[end:].lstrip()
    if rest:
        raise JsonProblem("unexpected text after the value", len(text) - len(rest))
    return value


def write_value(value: Json) -> str:
    """On one line, characters as they are."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def call_of(value: Json, key: str = "arguments") -> Call:
    """The call that an object with a name and arguments makes. `key` is what the family calls the arguments."""
    if not isinstance(value, Mapping):
        return MalformedCall(problem=f"the call is a JSON {kind(value)}, not an object with name and {key}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(problem=f"the call has no name; it needs a name and {key}")
    return named_call(name, value.get("arguments", value.get("parameters")), key)


def named_call(name: str, arguments: Json, key: str = "arguments") -> Call:
    """The call of `name`, where its arguments are an object, or a text that holds one."""
    if isinstance(arguments, str):
        try:
            arguments = read_text(arguments)
        except JsonProblem as problem:
            return MalformedCall(problem=f"the {key} of the call are not valid JSON: {problem.said(0)}")
    if not isinstance(arguments, Mapping):
        found = "missing" if arguments is None else f"a JSON {kind(arguments)}"
        return MalformedCall(problem=f"the {key} of the call are {found}; they must be an object")
    return ToolCall(name=name, arguments=arguments)


def kind(value: Json) -> str:
    """The JSON word for what `value` is."""
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return kinds.get(type(value), "object")


def _end_of_value(source: Source, at: int) -> Steps[int]:
    stack: list[str] = []
    want = "value"
    while True:
        at = yield from source.run(_SPACE, at)
        if at == len(source.text):
            raise JsonProblem(_WANTED[want], at)
        character = source.text[at]
        closes = stack[-1] if stack and want in (",", "first value", "first key") else None
        if character == closes:
            stack.pop()
            at, want = at + 1, ","
        elif want == "," and character == ",":
            at, want = at + 1, "key" if stack[-1] == "}" else "value"
        elif want == ":" and character == ":":
            at, want = at + 1, "value"
        elif want in ("key", "first key") and character == '"':
            at, want = (yield from _end_of_string(source, at)), ":"
        elif want not in ("value", "first value"):
            raise JsonProblem(_WANTED[want], at)
        elif character in "{[":
            if len(stack) == MAX_DEPTH:
                raise JsonProblem(f"nested too deep, more than {MAX_DEPTH} levels", at)
            stack.append("}" if character == "{" else "]")
            at, want = at + 1, "first key" if character == "{" else "first value"
        else:
            at, want = (yield from _end_of_scalar(source, at)), ","
        if want == "," and not stack:
            return at


def _end_of_scalar(source: Source, at: int) -> Steps[int]:
    if source.text[at] == '"':
        return (yield from _end_of_string(source, at))
    for literal in _LITERALS:
        if (yield from source.starts(literal, at)):
            return at + len(literal)
    for name in _NO_NUMBERS:
        if (yield from source.starts(name, at)):
            raise JsonProblem(f"{name} is no JSON number", at)
    end = yield from source.run(_NUMERIC, at)
    if end == at:
        raise JsonProblem(_WANTED["value"], at)
    if end - at > MAX_DIGITS:
        raise JsonProblem(f"a number of more than {MAX_DIGITS} digits", at)
    if not _NUMBER.fullmatch(source.text, at, end):
        raise JsonProblem(f"{source.text[at : min(end, at + 20)]!r} is no number", at)
    return end


def _end_of_string(source: Source, start: int) -> Steps[int]:
    at = start + 1
    while True:
        at = yield from source.run(_PLAIN, at)
        if at == len(source.text):
            raise JsonProblem("unterminated string that starts", start, len(source.text))
        if source.text[at] == '"':
            return at + 1
        if source.text[at] != "\\":
            raise JsonProblem("invalid control character in a string", at)
        while len(source.text) < at + 2 + 4 * (source.text[at + 1 : at + 2] == "u") and not source.ended:
            yield
        letter = source.text[at + 1 : at + 2]
        if not letter:
            raise JsonProblem("unterminated string that starts", start, len(source.text))
        if letter not in '"\\/bfnrtu' or (letter == "u" and not _HEX.match(source.text, at + 2)):
            raise JsonProblem("invalid \\escape in a string", at)
        at += 6 if letter == "u" else 2


def _value(text: str) -> Json:
    """The value of a text that is one value."""
    value: Json = json.loads(text, object_pairs_hook=_object, parse_float=_float)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise JsonProblem("half of a surrogate pair, which is no character") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise JsonProblem(f"the key {key[:40]!r} stands twice in an object")
        made[key] = value
    return made


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise JsonProblem(f"the number {digits[:20]} is too large")
    return number
