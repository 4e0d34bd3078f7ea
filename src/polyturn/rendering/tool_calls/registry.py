"""The formats by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from polyturn.errors import ConfigError, nearest
from polyturn.rendering.tool_calls.base import CallFormat, ToolSpec
from polyturn.rendering.tool_calls.fenced import Fenced
from polyturn.rendering.tool_calls.hermes import Hermes
from polyturn.rendering.tool_calls.llama3 import Llama3
from polyturn.rendering.tool_calls.mistral import Mistral
from polyturn.rendering.tool_calls.xml_tags import XmlTags

_MADE: Mapping[str, Callable[[Sequence[ToolSpec]], CallFormat]] = {
    "hermes": lambda specs: Hermes(),
    "llama3": lambda specs: Llama3(),
    "mistral": lambda specs: Mistral(),
    "xml": XmlTags,
    "fenced": Fenced,
}
CALL_FORMATS: tuple[str, ...] = tuple(_MADE)
"""The names that `call_format` knows."""


def call_format(name: str, specs: Sequence[ToolSpec] = ()) -> CallFormat:
    """The format called `name`, for calls of the tools `specs`. Raises ConfigError for a name that is no format.

    >>> call_format("hermes").write("look", {"at": "x"})
    '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
    """
    if name not in _MADE:
        raise ConfigError(f"{name!r} is no format of tool calls; {nearest(str(name), CALL_FORMATS)}")
    return _MADE[name](specs)
