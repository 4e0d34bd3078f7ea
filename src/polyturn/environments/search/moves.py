"""What a reply of `search_qa` asks for: searches, an answer, or neither, in tags or in a model family's own calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from polyturn.environments.tools.calls import read_call
from polyturn.rendering.tool_calls import MalformedCall, ToolCall, ToolSpec, call_format

ToolFormat = Literal["xml", "hermes", "llama3", "mistral"]

SEARCH = ToolSpec(
    name="search",
    description="Search an encyclopedia. Returns the passages that fit best.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Words to look for"}},
        "required": ["query"],
    },
)
"""The tool as models with calls of their own are told of it."""

_TAGS = "search|answer"
_WHOLE = re.compile(rf"<({_TAGS})>((?:(?!</?(?:{_TAGS})>).)*)</\1>", re.DOTALL)
_PIECE = re.compile(rf"</?(?:{_TAGS})>")
_CUT_PIECE = re.compile(r"</?[a-z]*\Z")
_THOUGHT = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL | re.IGNORECASE)
_THOUGHT_END = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_LOOKS_LIKE_A_TAG = re.compile(r"<(?=[A-Za-z/|_!\[])")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """`searches` in order; the last `answer`, stripped and not empty; `problem` with a tag or call that could not be read."""

    searches: tuple[str, ...] = ()
    answer: str | None = None
    problem: str | None = None


def read_moves(reply: str, form: ToolFormat, *, truncated: bool = False) -> Moves:
    """The moves of a reply, thoughts aside. Tags count when they are whole and hold no other tag.

    >>> read_moves("I should look. <search>highest hill</search>", "xml")
    Moves(searches=('highest hill',), answer=None, problem=None)
    """
    spoken = _THOUGHT.sub("", _THOUGHT_END.split(reply)[-1])
    if form == "xml":
        return _tags(spoken, truncated)
    parsed = call_format(form).parse(spoken, truncated=truncated)
    queries = [_query(call) for call in parsed.calls]
    said = _tags(parsed.text, truncated)
    problem = next((query.problem for query in queries if isinstance(query, MalformedCall)), said.problem)
    if said.searches:
        problem = problem or "<search> is no call here"
    searches = tuple(query for query in queries if isinstance(query, str))
    return Moves(searches=searches, answer=said.answer, problem=problem)


def write_search(query: str, form: ToolFormat) -> str:
    """A search as `read_moves` reads it."""
    if form == "xml":
        return f"<search>{query}</search>"
    arguments: Mapping[str, str] = {"query": query}
    return call_format(form).write("search", arguments)


def write_answer(answer: str) -> str:
    """An answer as `read_moves` reads it."""
    return f"<answer>{answer}</answer>"


def harmless(text: str) -> str:
    """Text of a passage on one line, nothing in which looks like a tag: `<answer>` becomes `< answer>`."""
    return _LOOKS_LIKE_A_TAG.sub("< ", _SPACE.sub(" ", text)).strip()


def _tags(text: str, truncated: bool) -> Moves:
    found: dict[str, list[str]] = {"search": [], "answer": []}
    for tag, body in _WHOLE.findall(text):
        found[tag].append(body.strip())
    rest = _WHOLE.sub("", text)
    piece = _PIECE.search(rest) or (_CUT_PIECE.search(rest) if truncated else None)
    problem = None
    if piece is not None:
        problem = f"{piece[0]} has no counterpart; a search is <search>words</search>, an answer <answer>words</answer>"
    answer = found["answer"][-1] if found["answer"] else None
    if answer == "":
        problem, answer = problem or "the answer is empty", None
    return Moves(searches=tuple(found["search"]), answer=answer, problem=problem)


def _query(call: ToolCall | MalformedCall) -> str | MalformedCall:
    checked = read_call(call, [SEARCH])
    return checked if isinstance(checked, MalformedCall) else str(checked.arguments["query"]).strip()
