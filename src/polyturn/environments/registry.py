"""Finds an environment by name or dotted path and builds it with arguments checked against its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from polyturn.config.dotted import load_dotted
from polyturn.environments.base import Environment
from polyturn.environments.resources import Resources, own_parameters
from polyturn.errors import EnvironmentSetupError, UserError, nearest

BUILTIN = {
    "chat": "polyturn.environments.builtin.chat:Chat",
    "gsm8k": "polyturn.environments.builtin.gsm8k:Gsm8k",
    "lookup": "polyturn.environments.builtin.lookup:Lookup",
    "python_code": "polyturn.environments.builtin.python_code:PythonCode",
    "search_qa": "polyturn.environments.builtin.search_qa:SearchQa",
    "tools": "polyturn.environments.builtin.tools:Tools",
    "user_sim": "polyturn.environments.builtin.user_sim:UserSim",
}


ADAPTERS: dict[str, str] = {
    "reasoning_gym": "polyturn.environments.adapters.reasoning_gym:ReasoningGym",
}
"""Class behind an id `PREFIX:NAME`. It is built with `name=NAME`."""


def environment_names() -> list[str]:
    """Names that a recipe may give as `environment.id`, besides dotted paths."""
    return sorted(BUILTIN)


def adapted(environment_id: str) -> tuple[str, str] | None:
    """Prefix and name of an id such as `reasoning_gym:chain_sum`, None for any other."""
    prefix, colon, name = environment_id.partition(":")
    return (prefix, name) if colon and prefix in ADAPTERS else None


def environment_class(environment_id: str) -> type[Environment]:
    """The class behind an id. Raises EnvironmentSetupError or ConfigError with the nearest name."""
    prefixed = adapted(environment_id)
    target = ADAPTERS[prefixed[0]] if prefixed else BUILTIN.get(environment_id, environment_id)
    if ":" not in target:
        raise EnvironmentSetupError(
            f"environment.id={environment_id!r} is unknown; {nearest(environment_id, BUILTIN)}, or give package.module:Class"
        )
    found = load_dotted(target)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise EnvironmentSetupError(f"{target} is not a subclass of polyturn.environments.Environment")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise EnvironmentSetupError(f"{target} lacks {', '.join(missing)}; every environment has them")
    if not isinstance(getattr(found, "name", None), str):
        raise EnvironmentSetupError(f'{target} has no name; give its class one: name = "{found.__name__.lower()}"')
    return found


def build_environment(environment_id: str, arguments: Mapping[str, Any], resources: Resources | None = None) -> Environment:
    """Build an environment. `resources` are what it may ask for besides its arguments.

    Raises:
        EnvironmentSetupError: unknown id, an argument its constructor doesn't have, or a constructor that raises.
    """
    cls = environment_class(environment_id)
    signature = inspect.signature(cls)
    parameters = own_parameters(signature)
    prefixed = adapted(environment_id)
    if prefixed and "name" in arguments:
        raise EnvironmentSetupError(f"environment.args.name is part of the id, {environment_id}; remove it")
    arguments = {**arguments, "name": prefixed[1]} if prefixed else arguments
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        for key in arguments:
            if key not in parameters:
                hint = nearest(key, parameters) if parameters else "it takes none"
                raise EnvironmentSetupError(f"environment.args.{key} is no argument of {environment_id}; {hint}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and parameter.kind not in _VARIADIC and name not in arguments:
            raise EnvironmentSetupError(f"environment {environment_id} needs environment.args.{name}")
    given = (resources or Resources()).missing(signature.parameters, arguments)
    if None in given.values():
        raise EnvironmentSetupError(f"environment {environment_id} runs code and there is no sandbox to run it in")
    try:
        return cls(**arguments, **given)
    except UserError:
        raise
    except Exception as error:
        raise EnvironmentSetupError(
            f"environment {environment_id} could not be built: {type(error).__name__}: {error}"
        ) from error


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
