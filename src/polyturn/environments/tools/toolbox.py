"""Makes the calls of a reply: each with a deadline and a limit on its output, and each failure blamed on who made it.

What the model did wrong, and every limit on what it does, is an observation: `error: ...`. Anything else raises.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, get_args

import pydantic_core

from polyturn.environments.tools.calls import read_call
from polyturn.errors import EnvironmentSetupError, ResourceError, nearest
from polyturn.processes.threads import in_thread
from polyturn.rendering.tool_calls import MalformedCall, ToolCall, ToolSpec

T = TypeVar("T")
Errors = Literal["raise", "observe"]
GRACE_S = 1.0
"""What a coroutine has to end in once its deadline has passed."""
MAX_STUCK = 16
"""Calls past their deadline that have not come back, before further ones are refused."""


class ToolError(Exception):
    """Raise it in a tool to tell the model what is wrong with its call: it reads `error: ...`, and the trajectory goes on."""


MODEL_ERRORS = (ToolError, ValueError, TypeError, ArithmeticError, LookupError)
"""What a tool raises for arguments that it can't do with."""


class Tool(Protocol):
    """Something that a model may call."""

    @property
    def spec(self) -> ToolSpec:
        """What the model is told of it."""

    @property
    def is_async(self) -> bool:
        """Whether the call that `bind` returns gives an awaitable. Others are run in a thread."""

    def bind(self, state: Any, arguments: Any) -> Callable[[], Any]:
        """The call, ready to be made. Raises ValueError in words for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the calls of a reply may use up.

    Raises EnvironmentSetupError for a value that is no limit.
    """

    call_deadline_s: float = 10.0
    """One call."""
    turn_deadline_s: float = 25.0
    """All calls of one reply. Keep it under rollout.tool_deadline_s, past which the trajectory is lost."""
    output_max_chars: int = 4000
    """Of one result; more is cut out of its middle."""
    max_calls_per_turn: int = 8
    """Further calls of a reply are not made."""

    def __post_init__(self) -> None:
        for name in ("call_deadline_s", "turn_deadline_s", "output_max_chars", "max_calls_per_turn"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise EnvironmentSetupError(f"environment.args.{name}={value!r} must be a number above 0")


@dataclass(slots=True)
class Answered:
    """Results of the calls of one reply, in order, and what was counted."""

    texts: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Toolbox:
    """The tools of an environment. Shared by all its trajectories; `state` is what differs between them.

    Raises:
        EnvironmentSetupError: no tools, two of one name, or with `parallel` one that is no coroutine.
    """

    def __init__(self, tools: Sequence[Tool], limits: Limits, *, errors: Errors = "raise", parallel: bool = False) -> None:
        if errors not in get_args(Errors):
            raise EnvironmentSetupError(
                f"environment.args.errors={errors!r} is no choice; {nearest(str(errors), get_args(Errors))}"
            )
        self.specs: tuple[ToolSpec, ...] = tuple(tool.spec for tool in tools)
        names = Counter(spec.name for spec in self.specs)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise EnvironmentSetupError(f"two tools are called {twice[0]!r}; rename one")
        waiting = [tool.spec.name for tool in tools if not tool.is_async]
        if parallel and waiting:
            raise EnvironmentSetupError(
                f"environment.args.parallel=true runs coroutines at once, and {waiting[0]} is none; make it async def"
            )
        self._tools = {tool.spec.name: tool for tool in tools}
        self._limits = limits
        self._observe = errors == "observe"
        self._parallel = parallel
        self._late: list[_Running] = []

    async def answer(self, calls: Sequence[ToolCall | MalformedCall], state: Any) -> Answered:
        """Make the calls of a reply, in order or at once.

        Raises:
            ResourceError: too many calls never came back.
            Exception: what a tool raised that is not the model's doing.
        """
        limits, answered = self._limits, Answered()
        end = asyncio.get_running_loop().time() + limits.turn_deadline_s
        made = calls[: limits.max_calls_per_turn]
        if self._parallel:
            results = await _all(self._one(call, state, end) for call in made)
        else:
            results = [await self._one(call, state, end) for call in made]
        for text, count in results:
            shown = self._cut(text)
            answered.texts.append(shown)
            answered.counts.update(("calls", *count, *(() if shown is text else ("output_cut",))))
        if len(calls) > len(made):
            answered.texts.append(f"error: only the first {len(made)} calls of a reply are made")
            answered.counts["calls_not_made"] += len(calls) - len(made)
        return answered

    async def _one(self, call: ToolCall | MalformedCall, state: Any, end: float) -> tuple[str, list[str]]:
        """The result of one call as text, and what to count of it."""
        read = read_call(call, self.specs)
        if isinstance(read, MalformedCall):
            return f"error: {read.problem}", ["malformed"]
        tool = self._tools[read.name]
        try:
            bound = tool.bind(state, read.arguments)
        except ValueError as error:
            return f"error: {error}", ["tool_error"]
        left_s = end - asyncio.get_running_loop().time()
        limit_s = min(self._limits.call_deadline_s, left_s)
        if limit_s <= 0:
            return f"error: {read.name} was not called: the calls of this reply took too long", ["tool_timeout"]
        ended = await self._within(limit_s, read.name, bound, is_async=tool.is_async)
        if ended is None:
            return f"error: {read.name} did not end within {limit_s:.3g} s", ["tool_timeout"]
        if ended.error is not None:
            return self._blamed(ended.error), ["tool_error"]
        return as_text(read.name, ended.value), []

    async def _within(self, limit_s: float, name: str, bound: Callable[[], Any], *, is_async: bool) -> _Ended | None:
        """How a call ended, None when its deadline passed. In a task of its own, as no tool can be trusted to give up."""
        self._late = [late for late in self._late if not late.ended]
        if len(self._late) >= MAX_STUCK:
            raise ResourceError(
                f"{len(self._late)} calls of tools passed their deadline and never came back, so {name} is not called; "
                "give the tools deadlines of their own"
            )
        running = _Running(name, bound, is_async)
        task = asyncio.create_task(running.run(), name=f"tool {name}")
        try:
            await asyncio.wait({task}, timeout=limit_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled():
            raise RuntimeError(f"tool {name} was cancelled from inside")
        if task.done():
            return task.result()
        task.cancel()
        self._late.append(running)
        await asyncio.wait({task}, timeout=GRACE_S)
        return None

    def _blamed(self, error: BaseException) -> str:
        """What the model reads of an error. Raises it when it is not the model's doing."""
        # An OSError comes from the world outside, also where a library makes it a ValueError too.
        of_the_model = isinstance(error, MODEL_ERRORS) and not isinstance(error, OSError)
        if not of_the_model and not (self._observe and isinstance(error, Exception)):
            raise error
        said = str(error).strip()
        return f"error: {said}" if isinstance(error, ToolError) and said else f"error: {type(error).__name__}: {said}"

    def _cut(self, text: str) -> str:
        """A text without its middle where it is too long, errors included: the model may have a hand in their words too."""
        most = int(self._limits.output_max_chars)
        if len(text) <= most:
            return text
        head, tail = text[: most - most // 2], text[len(text) - most // 2 :]
        return f"{head}\n[... {len(text) - most} characters left out ...]\n{tail}"


def as_text(name: str, value: Any) -> str:
    """A text as it is, anything else as JSON. Raises EnvironmentSetupError for what JSON can't say.

    >>> as_text("find", {"price": 3, "tags": ("a", "b")})
    '{"price": 3, "tags": ["a", "b"]}'
    """
    if isinstance(value, str):
        return str(value)
    try:
        return json.dumps(pydantic_core.to_jsonable_python(value, inf_nan_mode="constants"), ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise EnvironmentSetupError(
            f"tool {name} returned a {type(value).__name__} that JSON can't say ({str(error)[:100]}); "
            "return text or plain values"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A call that came back, with one of the two."""

    value: Any = None
    error: BaseException | None = None


class _Running:
    """One call under way. `ended` is set by the call itself, so that it tells whether a thread given up on still runs."""

    def __init__(self, name: str, bound: Callable[[], Any], is_async: bool) -> None:
        self.ended = False
        self._name = name
        self._bound = bound
        self._is_async = is_async

    async def run(self) -> _Ended:
        """Make the call. What it raises is returned: a SystemExit that leaves a task would end the loop."""
        try:
            value = await (self._awaited() if self._is_async else in_thread(self._threaded()))
            return _Ended(value=await value if inspect.isawaitable(value) else value)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:
            return _Ended(error=error)

    async def _awaited(self) -> Any:
        try:
            return await self._bound()
        finally:
            self.ended = True

    def _threaded(self) -> Callable[[], Any]:
        def call() -> Any:
            try:
                return self._bound()
            finally:
                self.ended = True

        call.__name__ = f"of tool {self._name}"  # the thread is named after it
        return call


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all at once; when all have ended, the first error of one is raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
