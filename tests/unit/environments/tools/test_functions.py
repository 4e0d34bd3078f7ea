"""What a model is told of a function, and which functions are refused."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parts import author_tools
from polyturn.environments.tools.calls import read_call
from polyturn.environments.tools.functions import function_tool, method_tools
from polyturn.errors import EnvironmentSetupError
from polyturn.rendering.tool_calls import MalformedCall, ToolCall


def test_a_function_in_the_style_of_google():
    spec = function_tool(author_tools.add).spec
    assert (spec.name, spec.description) == ("add", "Add two numbers.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "a": {"description": "The first one.", "type": "integer"},
            "b": {"default": 0, "description": "The other one.", "type": "integer"},
        },
        "required": ["a"],
        "additionalProperties": False,
    }


NUMPY = """Find it.

    Longer words.

    Parameters
    ----------
    word : str
        What to
        look for.
    """
SPHINX = """Find it.

    Longer words.

    :param word: What to look for.
    :type word: str
    """
GOOGLE = """Find
    it.
    Args:
        word (str): What to look for.
    Returns:
        nothing
    """


@pytest.mark.parametrize("doc", [NUMPY, SPHINX, GOOGLE], ids=["numpy", "sphinx", "google"])
def test_docstrings_in_each_style(doc):
    def find(word: str) -> None: ...

    find.__doc__ = doc
    spec = function_tool(find).spec
    assert spec.description == "Find it."
    assert spec.parameters["properties"]["word"]["description"] == "What to look for."


def test_no_docstring_and_a_hint_with_words():
    def find(word: Annotated[str, "what to look for"], n: int) -> None: ...

    spec = function_tool(find).spec
    assert spec.description == ""
    assert spec.parameters["properties"] == {
        "word": {"description": "what to look for", "type": "string"},
        "n": {"type": "integer"},
    }


class Point(pydantic.BaseModel):
    title: str
    x: float = 0.0


def many(
    copy: Point,
    json: list[int],
    /,
    kind: Literal["a", "b"] = "a",
    *,
    when: datetime.date = datetime.date(2020, 1, 2),
    model_config: dict[str, Point] | None = None,
    self: bool = False,
    _hidden: int = None,  # noqa: RUF013  # as people write it
) -> Any:
    return copy, json, kind, when, model_config, self, _hidden


def test_types_are_said_in_json_and_made_from_it_under_any_name():
    tool = function_tool(many)
    jsonschema.Draft202012Validator.check_schema(tool.spec.parameters)
    properties = tool.spec.parameters["properties"]
    assert properties["kind"] == {"default": "a", "enum": ["a", "b"], "type": "string"}
    assert properties["when"] == {"default": "2020-01-02", "format": "date", "type": "string"}
    assert tool.spec.parameters["$defs"]["Point"]["properties"]["title"] == {"type": "string"}
    assert tool.spec.parameters["required"] == ["copy", "json"]
    given = {"copy": {"title": "t", "x": 2}, "json": [1, 2.0], "when": "2026-02-03", "model_config": {"p": {"title": "q"}}}
    assert read_call(ToolCall(name="many", arguments=given), [tool.spec]).arguments == given
    expected = (Point(title="t", x=2), [1, 2], "a", datetime.date(2026, 2, 3), {"p": Point(title="q")}, False, None)
    assert tool.bind(None, given)() == expected


def test_what_the_schema_can_not_check_the_hints_do():
    tool = function_tool(many)
    given = {"copy": {"title": "t"}, "json": [], "when": "tomorrow"}
    assert isinstance(read_call(ToolCall(name="many", arguments=given), [tool.spec]), ToolCall)
    with pytest.raises(ValueError, match=r"when: .*valid date"):
        tool.bind(None, given)
    with pytest.raises(ValueError, match=r"a: .*maximum size"):
        function_tool(author_tools.add).bind(None, {"a": 1e300})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1e6, 1e6) | st.sampled_from(["", "3", []]),
    )
)
def test_every_call_that_is_read_can_be_made(arguments):
    tool = function_tool(author_tools.add)
    read = read_call(ToolCall(name="add", arguments=arguments), [tool.spec])
    if isinstance(read, MalformedCall):
        return
    assert tool.bind(None, read.arguments)() == int(arguments["a"]) + int(arguments.get("b", 0))


def test_defaults_are_the_functions_own():
    marker = [1]

    def give(items: list[int] = marker) -> list[int]:
        return items

    assert function_tool(give).bind(None, {})() is marker


def test_state_is_left_out_of_the_schema():
    tool = function_tool(author_tools.put)
    assert list(tool.spec.parameters["properties"]) == ["item"]
    state = {"items": []}
    assert tool.bind(state, {"item": "lamp"})() == ["lamp"]
    assert state == {"items": ["lamp"]}


def test_methods_are_tools():
    class Base:
        def first(self) -> int:
            return 1

        def second(self) -> int:
            return 2

    class Both(Base):
        constant = 3

        def second(self) -> int:
            return 22

        def third(self, state: int) -> int:
            return state

        def close(self): ...

        def _own(self): ...

    tools = {tool.spec.name: tool for tool in method_tools(Both, without=("close",))}
    assert list(tools) == ["first", "second", "third"]
    assert tools["second"].bind(Both(), {})() == 22
    assert tools["third"].bind(Both(), {"state": 7})() == 7, "a method's first parameter is its object, not a state"


def no_hint(x): ...
def some(*words: str): ...
def named(**words: str): ...
def unknown(x: Nowhere): ...  # noqa: F821
def nan(x: float = float("nan")): ...
def an_object(x: Any = object()): ...  # noqa: B008
def a_function(x: Callable[[], int]): ...
def a_class(x: functools.partial): ...
def no_type(x: 3): ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_hint, "tool no_hint: parameter x has no type hint; give it one, as in x: str"),
        (some, r"tool some: parameter \*words takes any number of values"),
        (named, r"tool named: parameter \*\*words takes any number of values"),
        (unknown, "the hint of parameter x can't be resolved: name 'Nowhere' is not defined"),
        (nan, "tool nan: the default of parameter x, nan, can't be said in JSON"),
        (an_object, "the default of parameter x, <object object at .*, can't be said in JSON"),
        (a_function, "the type of parameter x can't be said in JSON"),
        (a_class, "the type of parameter x can't be said in JSON"),
        (no_type, "parameter x"),
        (lambda: 3, "is no function with a name"),
        (print, "is no function with a name"),
        (functools.partial(print), "is no function with a name"),
        (3, "3 is no function with a name"),
    ],
)
def test_functions_that_are_refused(function, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        function_tool(function)


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_methods_without_an_object_are_refused(kind):
    cls = type("Box", (), {"look": kind(lambda: 3)})
    with pytest.raises(EnvironmentSetupError, match=rf"Box.look is a {kind.__name__}; make it a method"):
        list(method_tools(cls, without=()))
