"""`mistral`: a token, then a list of JSON objects; newer models write the name, another token and the arguments.

    [TOOL_CALLS] [{"name": "look", "arguments": {"at": "x"}}, {"name": "look", "arguments": {"at": "y"}}]
    [TOOL_CALLS]look[ARGS]{"at": "x"}[TOOL_CALLS]look[ARGS]{"at": "y"}

Both are read, the first is written. Ids of calls (`"id": "abc123XYZ"` in the object, `[CALL_ID]abc123XYZ` behind the name) are
passed over. Either token may be missing: then objects with `arguments`, and names right before `[ARGS]`, are calls.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from polyturn.rendering.tool_calls.bare import read_object
from polyturn.rendering.tool_calls.base import MalformedCall, ParsedReply, ToolSpec
from polyturn.rendering.tool_calls.json_text import JsonProblem, named_call, read_value, write_value
from polyturn.rendering.tool_calls.prompts import example_arguments, told
from polyturn.rendering.tool_calls.source import Source, SourceReader, Steps, Tags, parsed, shown
from polyturn.rendering.tool_calls.tagged import cut_off
from polyturn.types import Json

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
KEY = "arguments"
_OPENINGS, _STOPS = Tags(CALLS, ARGS, "{"), Tags(CALLS)
_NAME_CHARACTERS = string.ascii_letters + string.digits + "_.-"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
MAX_NAME = 200
"""Characters before `[ARGS]` that are looked at for the name."""


class Mistral:
    """See the top of the module."""

    name = "mistral"
    separator = ""

    def parse(self, reply: str, *, truncated: bool = False) -> ParsedReply:
        """See `CallFormat.parse`."""
        return parsed(self.reader(), reply, truncated)

    def reader(self) -> SourceReader:
        """See `CallFormat.reader`."""
        return SourceReader(_read)

    def write(self, name: str, arguments: Mapping[str, Json]) -> str:
        """See `CallFormat.write`."""
        return f"{CALLS} {write_value([{'name': name, KEY: arguments}])}"

    def instructions(self, specs: Sequence[ToolSpec]) -> str:
        """See `CallFormat.instructions`."""
        if not specs:
            return ""
        how = f"To call one, write {CALLS} and a JSON list of objects with name and {KEY}, one for each call:"
        return told(specs, how, self.write(specs[0].name, example_arguments(specs[0])))


def _read(source: Source) -> Steps[None]:
    position = start = 0
    while (found := (yield from source.find(_OPENINGS, start))) is not None:
        tag, at = found
        if tag == CALLS:
            source.say(position, at)
            position = start = yield from _announced(source, at + len(CALLS))
        elif tag == ARGS:
            name, named_at = _name_before(source.text[max(position, at - MAX_NAME) : at])
            source.say(position, at - named_at)
            position = start = yield from _arguments(source, name, at + len(ARGS))
        else:
            start, called = yield from read_object(source, at, key=KEY, stops=_STOPS, announced=False)
            if called:
                before = source.text[position:at].rstrip()
                listed = before.endswith("[")
                source.say(position, position + len(before) - 1 if listed else at)
                position = start = (yield from _rest_of_list(source, start)) if listed else start
    source.say(position, len(source.text))


def _announced(source: Source, start: int) -> Steps[int]:
    """What follows the token: a list, an object, or a name."""
    at = yield from source.space(start)
    mark = yield from source.which(("[", "{"), at)
    if mark == "{":
        return (yield from read_object(source, at, key=KEY, stops=_STOPS, announced=True))[0]
    if mark == "[" and not (yield from source.which((ARGS, CALL_ID), at)):
        first = yield from source.space(at + 1)
        if (yield from source.starts("]", first)):
            source.calls.append(MalformedCall(problem="the list of calls is empty"))
            return first + 1
        end, _ = yield from read_object(source, first, key=KEY, stops=_STOPS, announced=True)
        return (yield from _rest_of_list(source, end))
    end = yield from source.run(_NAME, at)
    name = source.text[at:end]
    body = yield from source.space(end)
    if (yield from source.starts(CALL_ID, body)):
        body = yield from source.run(_NAME, body + len(CALL_ID))
        body = yield from source.space(body)
    marked = yield from source.starts(ARGS, body)
    if marked or (name and (yield from source.starts("{", body))):
        return (yield from _arguments(source, name, body + len(ARGS) * marked))
    said = f"after {CALLS}{name[:40]}"
    return (yield from _refused(source, body, f"not {ARGS} and the arguments" if name else "not a list of calls", said))


def _rest_of_list(source: Source, end: int) -> Steps[int]:
    """The calls of a list after its first, which ends at `end`. A list that is open at the end of the reply is tolerated."""
    while True:
        at = yield from source.space(end)
        mark = yield from source.which((CALLS, ",", "]"), at)
        if mark == "]":
            return at + 1
        if mark == CALLS or at == len(source.text):
            return at
        if mark is None:
            return (yield from _refused(source, at, "not , or ]", "after a call of the list"))
        at = yield from source.space(at + 1)
        if (yield from source.starts("]", at)):
            return at + 1
        end, _ = yield from read_object(source, at, key=KEY, stops=_STOPS, announced=True)


def _arguments(source: Source, name: str, start: int) -> Steps[int]:
    """The arguments of a call whose name is known."""
    body = yield from source.space(start)
    try:
        value, end = yield from read_value(source, body)
    except JsonProblem as problem:
        said, stop, ends = problem.said(body), problem.stop, problem.at is None
    else:
        call = named_call(name, value) if name else MalformedCall(problem=f"there is no name before {ARGS}")
        source.calls.append(call)
        return end
    if not ends:
        found = yield from source.find(_STOPS, body)
        stop = len(source.text) if found is None else found[1]
    cut = source.truncated and stop == len(source.text) and not ends
    problem_words = f"the arguments of the call are not valid JSON: {said}"
    source.calls.append(cut_off("its end") if cut else MalformedCall(problem=problem_words))
    return stop


def _refused(source: Source, at: int, wanted: str, where: str) -> Steps[int]:
    """Something else than a call stands at `at`; all up to the next token is lost with it."""
    found = yield from source.find(_STOPS, at)
    stop = len(source.text) if found is None else found[1]
    if found is None and source.truncated:
        source.calls.append(cut_off("its end"))
    else:
        source.calls.append(MalformedCall(problem=f"{where} stands {shown(source.text, at, stop)}, {wanted}"))
    return stop


def _name_before(text: str) -> tuple[str, int]:
    """The name at the end of `text`, perhaps with an id behind it, and how many characters they take."""
    before = text.rstrip(_NAME_CHARACTERS)
    name = text[len(before) :]
    if before.endswith(CALL_ID):
        rest = before[: -len(CALL_ID)]
        before = rest.rstrip(_NAME_CHARACTERS)
        name = rest[len(before) :]
    return name, len(text) - len(before)
