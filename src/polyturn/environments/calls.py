"""Calls an environment's methods, coroutines or not, and checks what they return before anyone trusts it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, get_args

from polyturn.environments.base import StepResult
from polyturn.errors import EnvironmentSetupError
from polyturn.processes.threads import in_thread
from polyturn.types import Message, Role


async def call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Await `method`. One that is no coroutine runs in a thread of its own, so that one that blocks holds up nobody else."""
    if _is_coroutine(method):
        return await method(*arguments)
    result = await in_thread(method, *arguments)
    return await result if inspect.isawaitable(result) else result


def _is_coroutine(method: Callable[..., Any]) -> bool:
    code = getattr(method, "__code__", None)
    # `inspect` knows more kinds, and takes as long as all else that is done for a call.
    return (code is not None and bool(code.co_flags & inspect.CO_COROUTINE)) or inspect.iscoroutinefunction(method)


def checked_step(result: object, name: str) -> StepResult:
    """`result` with plain numbers. Raises EnvironmentSetupError, starting with `name`, for what is no proper StepResult."""
    if not isinstance(result, StepResult):
        _refuse(name, result, "a StepResult")
    if not isinstance(result.messages, tuple | list) or not all(map(_is_message, result.messages)):
        _refuse(name, result.messages, "messages: a tuple of Message with a role and a text")
    if not isinstance(result.state_key, str | None):
        _refuse(name, result.state_key, "state_key: a text or None")
    if not isinstance(result.counts, Mapping):
        _refuse(name, result.counts, "counts: numbers by name")
    return StepResult(
        messages=tuple(result.messages),
        reward=_number(result.reward, name, "reward"),
        done=bool(result.done),
        state_key=result.state_key,
        counts={str(key): _number(value, name, f"counts[{key!r}]") for key, value in result.counts.items()},
    )


def checked_outcome(outcome: object, name: str) -> dict[str, float | None]:
    """`outcome` with plain numbers in it. Raises EnvironmentSetupError, starting with `name`, when it holds anything else."""
    if not isinstance(outcome, Mapping):
        _refuse(name, outcome, "reward components by name")
    return {
        str(key): None if value is None else _number(value, name, f"the component {key!r}") for key, value in outcome.items()
    }


def _is_message(message: object) -> bool:
    return isinstance(message, Message) and isinstance(message.content, str) and message.role in get_args(Role)


def _number(value: Any, name: str, what: str) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        _refuse(name, value, f"{what}: a finite number")
    return number


def _refuse(name: str, found: object, wanted: str) -> NoReturn:
    raise EnvironmentSetupError(f"{name} returned {found!r:.80}, where it must return {wanted}")
