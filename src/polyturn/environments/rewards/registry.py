"""Finds the rewards of a recipe by name or dotted path, and builds them with arguments checked against their signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from polyturn.config.dotted import load_dotted
from polyturn.config.schema import RewardEntry
from polyturn.environments.resources import NAMES, Resources
from polyturn.environments.rewards.base import Reward
from polyturn.errors import EnvironmentSetupError, UserError, nearest

_HERE = "polyturn.environments.rewards"
BUILTIN = {
    "answer_in_results": f"{_HERE}.in_results:AnswerInResults",
    "code_runs": f"{_HERE}.code:CodeRuns",
    "exact_match": f"{_HERE}.exact_match:ExactMatch",
    "f1": f"{_HERE}.f1:F1",
    "length_penalty": f"{_HERE}.length:LengthPenalty",
    "llm_judge": f"{_HERE}.judge:LlmJudge",
    "repetition_penalty": f"{_HERE}.repetition:RepetitionPenalty",
    "soft_format": f"{_HERE}.soft_format:SoftFormat",
    "tests_passed": f"{_HERE}.code:TestsPassed",
    "valid_calls": f"{_HERE}.tool_calls:ValidCalls",
}


def build_rewards(entries: Sequence[RewardEntry], resources: Resources | None = None) -> list[Reward]:
    """The rewards of a recipe.

    Raises:
        ConfigError: a dotted path that leads nowhere.
        EnvironmentSetupError: an unknown name, wrong arguments, no sandbox where one is needed, two rewards of one name.
    """
    resources = resources or Resources()
    rewards = [_build(entry, resources) for entry in entries]
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise EnvironmentSetupError(f"two rewards are called {name!r}; give one another name, as in name: {name}_2")
    return rewards


def _build(entry: RewardEntry, resources: Resources) -> Reward:
    target = BUILTIN.get(entry.path, entry.path)
    if ":" not in target:
        raise EnvironmentSetupError(
            f"environment.rewards: {entry.path!r} is no built-in reward; {nearest(entry.path, BUILTIN)}, "
            "or give package.module:function"
        )
    found = load_dotted(target)
    if not callable(found):
        raise EnvironmentSetupError(f"environment.rewards: {target} can't be called; name a function of (trajectory, task)")
    return Reward(
        name=entry.component,
        function=_with_arguments(found, entry, resources),
        weight=entry.weight,
        scope=entry.per,
        success_at=entry.success_at,
        deadline_s=entry.deadline_s,
    )


def _with_arguments(found: Callable[..., Any], entry: RewardEntry, resources: Resources) -> Callable[..., Any]:
    """A function of (trajectory, task): a class is built with the arguments, a function gets them at every call."""
    is_class = inspect.isclass(found)
    parameters = inspect.signature(found).parameters
    taken = list(parameters) if is_class else list(parameters)[2:]
    known = [name for name in taken if not name.startswith("_") and name not in NAMES]
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        for key in entry.args:
            if key not in known:
                hint = nearest(key, known) if known else "it takes none"
                raise EnvironmentSetupError(f"environment.rewards: {key} is no argument of {entry.path}; {hint}")
    arguments: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.args.items()}
    given = resources.missing(taken, arguments)
    if None in given.values():
        raise EnvironmentSetupError(f"environment.rewards: {entry.path} runs code and there is no sandbox to run it in")
    arguments |= given
    required = [
        name for name in taken if parameters[name].default is inspect.Parameter.empty and parameters[name].kind not in _VARIADIC
    ]
    missing = [name for name in required if name not in arguments]
    if missing:
        raise EnvironmentSetupError(f"environment.rewards: {entry.path} needs args.{missing[0]}")
    if not is_class:
        if len(parameters) < 2:
            raise EnvironmentSetupError(f"environment.rewards: {entry.path} must take two arguments, (trajectory, task)")
        return functools.partial(found, **arguments) if arguments else found
    try:
        built: object = found(**arguments)
    except UserError as error:
        raise EnvironmentSetupError(f"environment.rewards: {entry.path}: {error}") from error
    except Exception as error:
        raise EnvironmentSetupError(
            f"environment.rewards: {entry.path} could not be built: {type(error).__name__}: {error}"
        ) from error
    if not callable(built):
        raise EnvironmentSetupError(f"environment.rewards: {entry.path} has no __call__(trajectory, task); add one")
    return built


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
