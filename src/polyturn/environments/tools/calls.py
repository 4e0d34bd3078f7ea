"""Holds a call against the tools that there are: its name, and its arguments by the tool's JSON schema."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jsonschema

from polyturn.errors import EnvironmentSetupError, nearest
from polyturn.rendering.tool_calls import MalformedCall, ToolCall, ToolSpec

MAX_SHOWN = 200
"""Characters of a problem that a model is shown."""


def read_call(call: ToolCall | MalformedCall, specs: Sequence[ToolSpec]) -> ToolCall | MalformedCall:
    """`call` when one of `specs` takes it; else what is wrong, in words for the model.

    >>> look = ToolSpec(name="look", description="", parameters={"type": "object", "properties": {"at": {"type": "string"}}})
    >>> read_call(ToolCall(name="lok", arguments={}), [look]).problem
    "there is no tool 'lok'; did you mean look?"
    """
    if isinstance(call, MalformedCall):
        return call
    spec = next((spec for spec in specs if spec.name == call.name), None)
    if spec is None:
        names = [spec.name for spec in specs]
        return MalformedCall(problem=f"there is no tool {call.name[:40]!r}; {nearest(call.name[:40], names)}")
    problem = arguments_problem(call, spec)
    return call if problem is None else MalformedCall(problem=problem)


def arguments_problem(call: ToolCall, spec: ToolSpec) -> str | None:
    """The first thing that is wrong with the arguments of a call, None when nothing is."""
    properties: Any = spec.parameters.get("properties", {})
    unknown = [name for name in call.arguments if name not in properties]
    if unknown and not spec.parameters.get("additionalProperties", False):
        hint = nearest(unknown[0][:40], list(properties)) if properties else "it takes none"
        return f"{spec.name} has no argument {unknown[0][:40]!r}; {hint}"
    try:
        errors = sorted(
            _validator(spec).iter_errors(dict(call.arguments)), key=lambda error: list(map(str, error.absolute_path))
        )
    except RecursionError:
        return f"the arguments of {spec.name} are nested too deep"
    if not errors:
        return None
    error = errors[0]
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        inside = _place(error.absolute_path)
        return f"{spec.name} needs the argument {inside + '.' if inside else ''}{missing}"
    return f"the argument {_place(error.absolute_path)} of {spec.name}: {_short(error.message)}"


def refuse_bad_schema(spec: ToolSpec) -> None:
    """Raise EnvironmentSetupError when the parameters of a tool are no JSON schema of an object."""
    try:
        jsonschema.Draft202012Validator.check_schema(dict(spec.parameters))
    except jsonschema.SchemaError as error:
        raise EnvironmentSetupError(
            f"the parameters of tool {spec.name} are no JSON schema: {_short(error.message)}"
        ) from error
    if spec.parameters.get("type", "object") != "object":
        raise EnvironmentSetupError(f"the parameters of tool {spec.name} must be an object, not {spec.parameters['type']!r}")


class _Held:
    """A spec as a key: specs hold mappings, which have no hash, and live as long as their environment."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.spec is self.spec


@lru_cache(maxsize=1024)
def _made(held: _Held) -> Any:
    return jsonschema.Draft202012Validator(dict(held.spec.parameters))


def _validator(spec: ToolSpec) -> Any:
    return _made(_Held(spec))


def _place(path: Any) -> str:
    """`items[2].name`, as the model would say it."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _short(message: str) -> str:
    return message if len(message) <= MAX_SHOWN else f"{message[: MAX_SHOWN // 2]} ... {message[-MAX_SHOWN // 2 :]}"
