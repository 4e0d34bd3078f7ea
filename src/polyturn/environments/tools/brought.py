"""Tools, state and score as an author brings them: functions, or a class whose methods they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from polyturn.config.dotted import load_dotted
from polyturn.environments.calls import call
from polyturn.environments.tools.functions import STATE, FunctionTool, function_tool, method_tools
from polyturn.errors import EnvironmentSetupError
from polyturn.types import Task

Named: TypeAlias = "str | Callable[..., Any]"
"""A dotted path, or the object itself."""
CLOSE, SCORE = "close", "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What an author wrote, looked up and checked."""

    tools: tuple[FunctionTool, ...]
    make_state: Callable[..., Any] | None = None
    close: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None

    async def state(self, task: Task) -> Any:
        """The state of a trajectory; None where there is none."""
        if self.make_state is None:
            return None
        takes = _positional(self.make_state)
        return await call(self.make_state, *((task,) if takes else ()))

    async def scored(self, state: Any, task: Task, answer: str | None) -> Mapping[str, Any]:
        """Outcome components of a trajectory whose final answer is `answer`. A number is the component `score`."""
        if self.score is None:
            return {}
        given = (state, task, answer)[: _positional(self.score)]
        value = await call(self.score, *given)
        return value if isinstance(value, Mapping) else {SCORE: value}

    async def end(self, state: Any) -> None:
        """Close a state that can be closed."""
        if self.close is not None:
            await call(self.close, state)


def bring(tools: Named | Sequence[Named], state: Named | None, score: Named | None) -> Brought:
    """Look up what the recipe names.

    Raises:
        ConfigError: a dotted path that leads nowhere.
        EnvironmentSetupError: what can't be a tool, a state or a score, or a tool that wants a state when there is none.
    """
    named = [tools] if isinstance(tools, str) or callable(tools) else list(tools)
    found = [_loaded(item, "tools") for item in named]
    scorer = None if score is None else _function(score, SCORE, most=3)
    classes = [item for item in found if isinstance(item, type)]
    if not classes:
        made = None if state is None else _function(state, STATE, most=1)
        brought = tuple(function_tool(item) for item in found)
        wanting = [tool.spec.name for tool in brought if tool.wants_state]
        if wanting and made is None:
            raise EnvironmentSetupError(
                f"tool {wanting[0]} takes the {STATE} of its trajectory; name what makes it in environment.args.state"
            )
        return Brought(tools=brought, make_state=made, score=scorer)
    if len(found) > 1 or state is not None:
        raise EnvironmentSetupError(
            f"environment.args.tools names the class {classes[0].__name__}, whose objects are the state; "
            "name it alone, and leave environment.args.state out"
        )
    return _of_class(classes[0], scorer)


def _of_class(cls: type, scorer: Callable[..., Any] | None) -> Brought:
    tools = tuple(method_tools(cls, without=(CLOSE, SCORE)))
    if not tools:
        raise EnvironmentSetupError(f"{cls.__name__} has no public methods to use as tools")
    _check_takes(cls, "__init__", most=1)
    close, score = getattr(cls, CLOSE, None), scorer or getattr(cls, SCORE, None)
    return Brought(tools=tools, make_state=cls, close=close, score=score)


def _loaded(named: Named, what: str) -> Any:
    if isinstance(named, str):
        return load_dotted(named)
    if not callable(named):
        raise EnvironmentSetupError(f"environment.args.{what}: {named!r} is no dotted path; write package.module:function")
    return named


def _function(named: Named, what: str, *, most: int) -> Callable[..., Any]:
    found = _loaded(named, what)
    if not callable(found):
        raise EnvironmentSetupError(f"environment.args.{what}: {named!r} can't be called; name a function")
    _check_takes(found, what, most=most)
    function: Callable[..., Any] = found
    return function


def _check_takes(function: Callable[..., Any], what: str, *, most: int) -> None:
    offered = {"__init__": "(self, task)", STATE: "(task)", SCORE: "(state, task, answer)"}[what]
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in _VARIADIC
    ]
    if len(needed) > most or any(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in needed):
        name = getattr(function, "__qualname__", repr(function))
        raise EnvironmentSetupError(f"{name} is called with {offered} or less, and takes {inspect.signature(function)}")


def _positional(function: Callable[..., Any]) -> int:
    """How many positional arguments a function takes; those it has defaults for stay its own, `answer` aside."""
    count = 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return 3
        own = parameter.default is not inspect.Parameter.empty and parameter.name not in ("task", "answer")
        if parameter.kind not in _BY_PLACE or own:
            break
        count += 1
    return count


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
