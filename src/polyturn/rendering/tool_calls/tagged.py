"""JSON between an opening and a closing tag, as several families write it.

Tolerated: white space, a code fence around the JSON, and a missing closing tag at the end of a reply that no limit cut off.
"""

from __future__ import annotations

from collections.abc import Callable

from polyturn.rendering.tool_calls.base import Call, MalformedCall
from polyturn.rendering.tool_calls.json_text import JsonProblem, read_value
from polyturn.rendering.tool_calls.source import Source, Steps, Tags, shown
from polyturn.types import Json

_FENCE = "```"


def read_tagged(source: Source, start: int, *, close: str, stops: Tags, make: Callable[[Json], Call]) -> Steps[int]:
    """Read the call whose body starts at `start`. Returns where the reply goes on.

    `make` turns the JSON into a call. `stops` are `close` and the tags that open a call: they end JSON that can't be read, and
    so does not say itself where it ends.
    """
    body = yield from source.space(start)
    fenced = yield from source.starts(_FENCE, body)
    if fenced:
        body += len(_FENCE)
        body += len("json") * (yield from source.starts("json", body))
        body = yield from source.space(body)
    try:
        value, end = yield from read_value(source, body)
    except JsonProblem as problem:
        said = problem.said(body)
    else:
        return (yield from _closed(source, end, fenced, close, make(value)))
    found = yield from source.find(stops, start)
    cut = found is None and source.truncated
    source.calls.append(cut_off(close) if cut else MalformedCall(problem=f"the call is not valid JSON: {said}"))
    if found is None:
        return len(source.text)
    tag, at = found
    return at + len(tag) if tag == close else at


def cut_off(close: str) -> MalformedCall:
    """A call that a limit ended."""
    return MalformedCall(problem=f"the call was cut off before {close}")


def _closed(source: Source, end: int, fenced: bool, close: str, call: Call) -> Steps[int]:
    """Add `call` when its closing tag follows."""
    end = yield from source.space(end)
    if fenced and (yield from source.starts(_FENCE, end)):
        end = yield from source.space(end + len(_FENCE))
    if (yield from source.starts(close, end)):
        source.calls.append(call)
        return end + len(close)
    if end == len(source.text):
        source.calls.append(cut_off(close) if source.truncated else call)
        return end
    found = yield from source.find(Tags(close), end)
    if found is None and source.truncated and close.startswith(source.text[end : end + len(close)]):
        source.calls.append(cut_off(close))
        return len(source.text)
    stop = len(source.text) if found is None else found[1]
    problem = f"after the JSON of the call stands {shown(source.text, end, stop)}, not {close}"
    source.calls.append(MalformedCall(problem=problem))
    return stop if found is None else stop + len(close)
