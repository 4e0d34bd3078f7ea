"""Words of the instructions that formats give: the tools there are, and arguments for an example call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.rendering.tool_calls.base import ToolSpec
from polyturn.rendering.tool_calls.json_text import write_value
from polyturn.types import Json

_EXAMPLES: Mapping[str, Json] = {"string": "...", "integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}}


def told(specs: Sequence[ToolSpec], how: str, example: str) -> str:
    """The tools with their JSON schemas, `how` to call one, and an example."""
    listed = [f"- {spec.name}: {spec.description}\n  arguments: {write_value(spec.parameters)}" for spec in specs]
    return "\n".join(["You have these tools:", *listed, *calling(how, example)])


def calling(how: str, example: str) -> list[str]:
    """The lines that say how to call a tool."""
    return [how, example, "You may make several calls in a reply. Then wait for their results."]


def properties(spec: ToolSpec) -> Mapping[str, Mapping[str, Any]]:
    """The schema of every argument, an empty one where there is none that can be read."""
    found: Any = spec.parameters.get("properties", {})
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in found.items()}


def required(spec: ToolSpec) -> tuple[str, ...]:
    """The arguments that a call must have."""
    found: Any = spec.parameters.get("required", ())
    return tuple(found)


def example_arguments(spec: ToolSpec) -> dict[str, Json]:
    """Arguments that show the form of a call: its required ones, or the first where none is required."""
    schemas = properties(spec)
    names = [name for name in required(spec) if name in schemas] or list(schemas)[:1]
    return {name: _example(schemas[name]) for name in names}


def _example(schema: Mapping[str, Any]) -> Json:
    for key in ("examples", "enum"):
        if isinstance(schema.get(key), Sequence) and schema[key]:
            value: Json = schema[key][0]
            return value
    kinds = schema.get("type", "string")
    return _EXAMPLES.get(kinds if isinstance(kinds, str) else kinds[0], "...")
