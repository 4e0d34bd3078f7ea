"""A call as a bare JSON object in the text of a reply, as models write it whose opening token is optional, or got lost.

Text may hold other JSON. In it, an object is a call when it has arguments; one that can't be read is meant as a call when it
names arguments, or starts with a name. Behind a token that announces a call, anything is one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from polyturn.rendering.tool_calls.base import MalformedCall
from polyturn.rendering.tool_calls.json_text import JsonProblem, call_of, read_value
from polyturn.rendering.tool_calls.source import Source, Steps, Tags
from polyturn.rendering.tool_calls.tagged import cut_off
from polyturn.types import Json

_MEANT = re.compile(r'"(?:arguments|parameters)"\s*:')
_NAMED = re.compile(r'\{\s*"(?:name|function)"\s*:\s*"')


def read_object(source: Source, at: int, *, key: str, stops: Tags, announced: bool) -> Steps[tuple[int, bool]]:
    """Read the JSON that starts at `at`. Returns where the reply goes on, and whether it was a call.

    `stops` are the marks that open another call: they end JSON that can't be read, and so does not say itself where it ends.
    """
    try:
        value, end = yield from read_value(source, at)
    except JsonProblem as problem:
        said, stop, ends = problem.said(at), problem.stop, problem.at is None
    else:
        if not announced and not is_call(value):
            return end, False
        source.calls.append(call_of(_with_name(value), key))
        return end, True
    if not announced and not meant(source.text[at:stop]):
        return stop, False
    if not ends:
        found = yield from source.find(stops, at + 1)
        stop = len(source.text) if found is None else found[1]
    cut = source.truncated and stop == len(source.text) and not ends
    source.calls.append(cut_off("its end") if cut else MalformedCall(problem=f"the call is not valid JSON: {said}"))
    return stop, True


def is_call(value: Json) -> bool:
    """Whether JSON in a text is meant as a call."""
    return isinstance(value, Mapping) and ("arguments" in value or "parameters" in value)


def meant(text: str) -> bool:
    """Whether JSON that can't be read was meant as a call."""
    return bool(_MEANT.search(text) or _NAMED.match(text))


def _with_name(value: Json) -> Json:
    """Some models write the name as `function`."""
    if isinstance(value, Mapping) and "name" not in value and isinstance(value.get("function"), str):
        return {**value, "name": value["function"]}
    return value
