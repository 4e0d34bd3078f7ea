"""What all forms of tool calls have in common: the calls, the tools, and the two ways to read a reply.

`CallFormat.parse` reads a whole reply. `CallFormat.reader` reads one piece by piece while it is sampled and ends with the same
result, however the reply is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from polyturn.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that could be read."""

    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A call that could not; `problem` says what is wrong with it, in words for the model."""

    problem: str


Call: TypeAlias = ToolCall | MalformedCall


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

    >>> from polyturn.rendering.tool_calls import call_format
    >>> call_format("hermes").parse('Hm. <tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>').calls
    (ToolCall(name='look', arguments={'at': 'x'}),)
    """

    text: str
    calls: tuple[Call, ...]


class CallReader(Protocol):
    """Reads one reply that arrives in pieces."""

    def feed(self, text: str) -> tuple[Call, ...]:
        """Read on. Returns the calls that are now complete and were not before: what follows can't change them."""
        ...

    def finish(self, truncated: bool = False) -> ParsedReply:
        """The whole reply, as `parse` gives it. To be called once, after the last piece."""
        ...


class CallFormat(Protocol):
    """How the models of one family write calls. Holds no state of any reply."""

    @property
    def name(self) -> str:
        """The name by which `call_format` knows it."""
        ...

    @property
    def separator(self) -> str:
        """What stands between two calls of one reply, as the family writes them."""
        ...

    def parse(self, reply: str, *, truncated: bool = False) -> ParsedReply:
        """Find the calls in `reply`. With `truncated` a last call without its end is malformed, whatever it holds.

        Never raises, and takes time in proportion to the length of the reply.
        """
        ...

    def write(self, name: str, arguments: Mapping[str, Json]) -> str:
        """The text of a call. `parse` of it gives the call back exactly."""
        ...

    def instructions(self, specs: Sequence[ToolSpec]) -> str:
        """Text for a system message: which tools there are, how one is called, an example. Empty without tools."""
        ...

    def reader(self) -> CallReader:
        """A reader for one reply."""
        ...
