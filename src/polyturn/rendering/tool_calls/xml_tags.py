"""`xml`: tags named after the tools, as search and code-interpreter papers write calls. Needs the tools' specs.

    <search>capital of France</search>
    <look><at>x</at><depth>2</depth></look>

A tool with exactly one required argument, a text, is written as its tag around that text; other arguments, and other tools,
have a tag for each argument. `<tool/>` is a call without arguments.

White space around a text is not part of it. `&lt;`, `&gt;`, `&amp;` and their kin stand for their characters; others may stand
as they are, unless they spell a tag of this format. An argument that is no text is JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.errors import ConfigError, EnvironmentSetupError
from polyturn.rendering.tool_calls.base import MalformedCall, ParsedReply, ToolCall, ToolSpec
from polyturn.rendering.tool_calls.json_text import JsonProblem, read_text, write_value
from polyturn.rendering.tool_calls.prompts import calling, example_arguments, properties, required
from polyturn.rendering.tool_calls.source import Source, SourceReader, Steps, Tags, parsed, shown
from polyturn.rendering.tool_calls.tagged import cut_off
from polyturn.types import Json

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_ENTITY = re.compile(r"&(?:(lt|gt|amp|quot|apos)|#([0-9]{1,7})|#x([0-9a-fA-F]{1,6}));")
_NAMED = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}


class Tool:
    """A tool and the kinds of its arguments: `text`, `json`, or `any`, which is JSON where it can be and a text where not."""

    def __init__(self, spec: ToolSpec) -> None:
        self.name = spec.name
        self.kinds = {name: _kind(schema) for name, schema in properties(spec).items()}
        for name in (self.name, *self.kinds):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"tool {self.name!r} has the name {name!r}, which can't be a tag of the format xml; "
                    "use letters, digits and _, or another format"
                )
        needed = required(spec)
        self.only = needed[0] if len(needed) == 1 and self.kinds.get(needed[0]) == "text" else None
        self.close = f"</{self.name}>"
        self.openings = {f"<{name}>": name for name in self.kinds}


class XmlTags:
    """See the top of the module. Raises ConfigError without specs, or with names that can't be tags."""

    name = "xml"
    separator = "\n"

    def __init__(self, specs: Sequence[ToolSpec]) -> None:
        if not specs:
            raise ConfigError("the format xml is made of the tools' names; call_format('xml', specs) needs their specs")
        self._tools = {spec.name: Tool(spec) for spec in specs}
        if len(self._tools) < len(specs):
            raise ConfigError(f"two tools have one name among {[spec.name for spec in specs]}; give each its own")
        self._openings = {
            opening: tool for name, tool in self._tools.items() for opening in (f"<{name}>", f"<{name}/>", f"<{name} />")
        }
        self._tags = Tags(*self._openings)
        names = {name for tool in self._tools.values() for name in (tool.name, *tool.kinds)}
        self._own = re.compile(rf"<(?=/?(?:{'|'.join(map(re.escape, sorted(names)))})[\s/>])")

    def parse(self, reply: str, *, truncated: bool = False) -> ParsedReply:
        """See `CallFormat.parse`."""
        return parsed(self.reader(), reply, truncated)

    def reader(self) -> SourceReader:
        """See `CallFormat.reader`."""
        return SourceReader(self._read)

    def write(self, name: str, arguments: Mapping[str, Json]) -> str:
        """See `CallFormat.write`. Raises EnvironmentSetupError for a tool or arguments that the specs don't have."""
        tool = self._tools.get(name)
        unknown = sorted(set(arguments) - set(tool.kinds if tool else ()))
        if tool is None or unknown:
            missing = f"{name} has no argument {unknown[0]!r}" if tool else f"there is no tool {name!r}"
            raise EnvironmentSetupError(f"a call can't be written in the format xml: {missing}; name it in the specs")
        if not arguments:
            return f"<{name}/>"
        if tool.only is not None and set(arguments) == {tool.only}:
            return f"<{name}>{self._written(tool, tool.only, arguments[tool.only])}{tool.close}"
        inside = "".join(f"<{key}>{self._written(tool, key, value)}</{key}>" for key, value in arguments.items())
        return f"<{name}>{inside}{tool.close}"

    def instructions(self, specs: Sequence[ToolSpec]) -> str:
        """See `CallFormat.instructions`."""
        if not specs:
            return ""
        lines = ["You have these tools:"]
        for spec in specs:
            lines.append(f"- {spec.name}: {spec.description}")
            needed = required(spec)
            lines += [f"  {key}: {_told(schema, key in needed)}" for key, schema in properties(spec).items()]
        examples = [self.write(spec.name, example_arguments(spec)) for spec in specs]
        return "\n".join([*lines, *calling("To call one, write its tag with the arguments inside:", "\n".join(examples))])

    def _written(self, tool: Tool, key: str, value: Json) -> str:
        kind = tool.kinds[key]
        if kind == "text" and not isinstance(value, str):
            raise EnvironmentSetupError(
                f"a call of {tool.name} can't be written in the format xml: its argument {key} is {value!r}, no text"
            )
        plain = isinstance(value, str) and (kind == "text" or (kind == "any" and not _is_json(value)))
        text = str(value) if plain else write_value(value)
        text = self._own.sub("&lt;", _ENTITY.sub(lambda match: f"&amp;{match[0][1:]}", text))
        inner = text.strip()
        start = text.find(inner) if inner else len(text)
        return _as_entities(text[:start]) + inner + _as_entities(text[start + len(inner) :])

    def _read(self, source: Source) -> Steps[None]:
        position = 0
        while (found := (yield from source.find(self._tags, position))) is not None:
            opening, at = found
            source.say(position, at)
            tool, position = self._openings[opening], at + len(opening)
            if opening.endswith("/>"):
                source.calls.append(ToolCall(name=tool.name, arguments={}))
            else:
                position = yield from _call(source, tool, position)
        source.say(position, len(source.text))


def _call(source: Source, tool: Tool, start: int) -> Steps[int]:
    """The call whose inside starts at `start`."""
    at = yield from source.space(start)
    child = yield from source.which(tool.openings, at)
    if child is None and tool.only is not None:
        found = yield from source.find(Tags(tool.close), start)
        if found is None:
            return _unclosed(source, tool.close)
        arguments = {tool.only: _unescaped(source.text[start : found[1]])}
        source.calls.append(ToolCall(name=tool.name, arguments=arguments))
        return found[1] + len(tool.close)
    return (yield from _children(source, tool, at))


def _children(source: Source, tool: Tool, at: int) -> Steps[int]:
    """The arguments of a call, each in its tag. Of several things that are wrong the first is told."""
    arguments: dict[str, Json] = {}
    problem = ""
    while not (yield from source.starts(tool.close, at)):
        opening = yield from source.which(tool.openings, at)
        key = tool.openings.get(opening or "", "")
        ends = Tags(f"</{key}>", tool.close) if key and key != tool.name else Tags(tool.close)
        found = yield from source.find(ends, at)
        if found is None:
            return _unclosed(source, f"</{key}>" if key else tool.close)
        tag, end = found
        if not key or (tag == tool.close and key != tool.name):
            inside = f"<{key}> has no </{key}>" if key else f"in <{tool.name}> stands {shown(source.text, at, end)}"
            wanted = "" if key else f", not {' or '.join([*tool.openings, tool.close])}"
            source.calls.append(MalformedCall(problem=problem or f"{inside}{wanted}"))
            return end + len(tool.close)
        text = _unescaped(source.text[at + len(f"<{key}>") : end])
        if key in arguments:
            problem = problem or f"<{key}> stands twice in <{tool.name}>"
        try:
            arguments[key] = _value(tool.kinds[key], text)
        except JsonProblem as error:
            arguments[key] = None
            problem = problem or f"the argument {key} is not valid JSON: {error.said(0)}"
        at = yield from source.space(end + len(tag))
    source.calls.append(MalformedCall(problem=problem) if problem else ToolCall(name=tool.name, arguments=arguments))
    return at + len(tool.close)


def _unclosed(source: Source, close: str) -> int:
    source.calls.append(cut_off(close) if source.truncated else MalformedCall(problem=f"the call has no {close}"))
    return len(source.text)


def _value(kind: str, text: str) -> Json:
    if kind == "text":
        return text
    try:
        return read_text(text)
    except JsonProblem:
        if kind == "any":
            return text
        raise


def _is_json(text: str) -> bool:
    try:
        read_text(text)
    except JsonProblem:
        return False
    return True


def _kind(schema: Mapping[str, Any]) -> str:
    kinds = schema.get("type")
    if kinds == "string":
        return "text"
    names = [kinds] if isinstance(kinds, str) else kinds
    return "json" if isinstance(names, Sequence) and "string" not in names else "any"


def _told(schema: Mapping[str, Any], needed: bool) -> str:
    """An argument in a line: its kind, whether it must be there, what it is."""
    details = {name: value for name, value in schema.items() if name not in ("type", "description")}
    parts = [str(schema.get("type", "any value")), "required" if needed else "optional"]
    parts += [write_value(details)] if details else []
    return ", ".join(parts) + (f". {schema['description']}" if schema.get("description") else "")


def _as_entities(text: str) -> str:
    return "".join(f"&#{ord(character)};" for character in text)


def _unescaped(text: str) -> str:
    """A text without the white space around it; one of several lines keeps the indent of its first."""
    text = text.strip() if "\n" not in text.strip() else re.sub(r"\A(?:[^\S\n]*\n)+", "", text.rstrip())
    return _ENTITY.sub(_character, text)


def _character(match: re.Match[str]) -> str:
    if match[1]:
        return _NAMED[match[1]]
    code = int(match[2]) if match[2] else int(match[3], 16)
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else match[0]
