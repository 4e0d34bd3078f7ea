"""A Python function as a tool: what the model is told of it, and its arguments made into what the function expects.

    def add(a: int, b: int = 0) -> int:
        '''Add two numbers.

Args:
            a: The first one.
            b: The other one.
        '''
        return a + b

Type hints become the JSON schema, the first paragraph of the docstring the description, and its section of parameters (in
the style of Google, NumPy or Sphinx) theirs. Default values are the function's own.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import docstring_parser
import pydantic
import pydantic_core
from pydantic.errors import PydanticUserError

from polyturn.environments.tools.calls import refuse_bad_schema
from polyturn.errors import EnvironmentSetupError
from polyturn.rendering.tool_calls import ToolSpec
from polyturn.types import Json

STATE = "state"
"""First parameter of a function that gets the state of the trajectory."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SCHEMAS_BY_NAME = ("properties", "$defs")
_PARTS = ("properties", "required", "additionalProperties", "$defs")
_VALUES = ("default", "enum", "const", "examples")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A function, or a method of the trajectory's object, that a model may call."""

    spec: ToolSpec
    function: Callable[..., Any]
    wants_state: bool
    """Whether the state, or the object whose method it is, is its first argument."""
    parameters: Mapping[str, inspect.Parameter]
    arguments: type[pydantic.BaseModel]

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function; others are run in a thread."""
        return inspect.iscoroutinefunction(self.function)

    def bind(self, state: Any, arguments: Mapping[str, Json]) -> Callable[[], Any]:
        """The call, ready to be made. Raises ValueError for a value that the hints don't allow, in words for the model."""
        try:
            given = self.arguments.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            raise ValueError(_problem(error)) from None
        positional: list[Any] = [state] if self.wants_state else []
        named: dict[str, Any] = {}
        for index, (name, parameter) in enumerate(self.parameters.items()):
            if _field(index) not in given.model_fields_set:
                continue
            value = getattr(given, _field(index))
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[name] = value
        return functools.partial(self.function, *positional, **named)


def function_tool(function: object, *, method: bool = False) -> FunctionTool:
    """A tool from a function, or with `method` from one whose first parameter is the object it belongs to.

    Raises:
        EnvironmentSetupError: naming the parameter without a hint, or of a type or with a default that JSON can't say.
    """
    if not isinstance(function, types.FunctionType) or not function.__name__.isidentifier():
        raise EnvironmentSetupError(f"{function!r:.80} is no function with a name; write a def with type hints")
    name = function.__name__
    parameters = dict(inspect.signature(function).parameters)
    first = next(iter(parameters), None)
    wants_state = method or first == STATE
    if wants_state and first is not None:
        del parameters[first]
    description, described = _described(function)
    fields: dict[str, Any] = {}
    for index, (key, parameter) in enumerate(parameters.items()):
        hint = _hint(function, parameter)
        given: dict[str, Any] = {"alias": key}
        if said := described.get(key) or _annotated(hint):
            given["description"] = said
        if parameter.default is not inspect.Parameter.empty:
            given["default"] = _default(name, parameter, hint)
        fields[_field(index)] = (hint, pydantic.Field(**given))
    model = pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a default that its own hint does not allow, such as None for an int
        schema: Any = _untitled(model.model_json_schema())
    spec = ToolSpec(
        name=name,
        description=description,
        parameters={"type": "object", "properties": {}, **{key: schema[key] for key in _PARTS if key in schema}},
    )
    refuse_bad_schema(spec)
    return FunctionTool(spec=spec, function=function, wants_state=wants_state, parameters=parameters, arguments=model)


def method_tools(cls: type, *, without: tuple[str, ...]) -> Iterator[FunctionTool]:
    """The public methods of a class, base classes first, each in the order it is written. Raises as `function_tool` does."""
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__[:-1]):
        found.update(vars(base))
    for name, member in found.items():
        if name.startswith("_") or name in without:
            continue
        if isinstance(member, staticmethod | classmethod):
            raise EnvironmentSetupError(
                f"{cls.__name__}.{name} is a {type(member).__name__}; make it a method, or name it _{name}"
            )
        if isinstance(member, types.FunctionType):
            yield function_tool(member, method=True)


def _field(index: int) -> str:
    """The model's own name of a parameter: any name but this may be one that pydantic keeps for itself."""
    return f"argument_{index}"


def _hint(function: types.FunctionType, parameter: inspect.Parameter) -> Any:
    """The resolved type hint of a parameter."""
    tool, name = function.__name__, parameter.name
    if parameter.kind in _VARIADIC:
        stars = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "**"
        raise EnvironmentSetupError(f"tool {tool}: parameter {stars}{name} takes any number of values; name each one")
    if parameter.annotation is inspect.Parameter.empty:
        raise EnvironmentSetupError(f"tool {tool}: parameter {name} has no type hint; give it one, as in {name}: str")
    holder = types.SimpleNamespace(__annotations__={name: parameter.annotation})
    try:
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        hint = typing.get_type_hints(holder, globalns=scope, include_extras=True)[name]
        pydantic.TypeAdapter(hint).json_schema()
    except NameError as error:
        raise EnvironmentSetupError(f"tool {tool}: the hint of parameter {name} can't be resolved: {error}") from None
    except (PydanticUserError, TypeError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise EnvironmentSetupError(
            f"tool {tool}: the type of parameter {name} can't be said in JSON ({reason}); use plain types"
        ) from None
    return hint


def _default(tool: str, parameter: inspect.Parameter, hint: Any) -> Any:
    """The default of a parameter, which the schema shows."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(parameter.default, float):
                json.dumps(parameter.default, allow_nan=False)
            json.dumps(pydantic.TypeAdapter(hint).dump_python(parameter.default, mode="json"), allow_nan=False)
    except (ValueError, TypeError, pydantic_core.PydanticSerializationError):
        raise EnvironmentSetupError(
            f"tool {tool}: the default of parameter {parameter.name}, {parameter.default!r:.60}, can't be said in JSON; "
            "use a plain value, or None and replace it inside"
        ) from None
    return parameter.default


def _described(function: types.FunctionType) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and the texts of its parameters."""
    text = inspect.getdoc(function) or ""
    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError:
        return " ".join(text.partition("\n\n")[0].split()), {}
    first = parsed.short_description or ""
    if parsed.long_description and not parsed.blank_after_short_description:
        first += " " + parsed.long_description.partition("\n\n")[0]
    described = {item.arg_name.lstrip("*"): " ".join((item.description or "").split()) for item in parsed.params}
    return " ".join(first.split()), {name: said for name, said in described.items() if said}


def _annotated(hint: Any) -> str | None:
    """The text of `Annotated[int, "a text"]`."""
    return next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, str)), None)


def _untitled(schema: Any) -> Any:
    """A schema without the titles that pydantic makes up."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME:
            kept[key] = {name: _untitled(inner) for name, inner in value.items()}
        elif key in _VALUES:
            kept[key] = value
        elif key != "title":
            kept[key] = _untitled(value)
    return kept


def _problem(error: pydantic.ValidationError) -> str:
    """The first thing that pydantic found, in one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'][:200]}"
