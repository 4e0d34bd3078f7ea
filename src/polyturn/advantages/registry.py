"""From a name and options in the recipe to an estimator; everything wrong with them is refused here, in one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from polyturn.advantages.base import Estimator
from polyturn.advantages.dr_grpo import DrGrpo
from polyturn.advantages.gigpo import GiGpo
from polyturn.advantages.grpo import Grpo
from polyturn.advantages.mt_grpo import MtGrpo
from polyturn.advantages.rloo import Rloo
from polyturn.advantages.turn_rtg import TurnRtg
from polyturn.config.dotted import load_dotted
from polyturn.errors import ConfigError, nearest

ESTIMATORS: dict[str, type[Any]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "mt_grpo": MtGrpo,
    "turn_rtg": TurnRtg,
    "gigpo": GiGpo,
}


def build_estimator(name: str, options: Mapping[str, Any] | None = None) -> Estimator:
    """The estimator that `algorithm.advantage` names, with `algorithm.advantage_options` as its fields.

    Raises ConfigError for an unknown name, a class that can't be imported, an unknown option or a value of the wrong type.

    >>> build_estimator("turn_rtg", {"gamma": 0.9})
    TurnRtg(gamma=0.9, baseline='survivors')
    """
    chosen = _load_class(name) if ":" in name else ESTIMATORS.get(name)
    if chosen is None:
        raise ConfigError(
            f"algorithm.advantage={name!r} is unknown; {nearest(name, ESTIMATORS)} (your own: package.module:Class)"
        )
    checked = _checked_options(name, chosen, options or {})
    try:
        inspect.signature(chosen).bind(**checked)
    except TypeError as error:
        raise ConfigError(f"algorithm.advantage_options of {name}: {error}; give it a value") from error
    estimator = chosen(**checked)
    if not isinstance(estimator, Estimator):
        raise ConfigError(f"algorithm.advantage={name!r} can't be called; give its class a method __call__(self, groups)")
    return estimator


def _load_class(path: str) -> type[Any]:
    """The class at `package.module:Class`."""
    found = load_dotted(path)
    if not isinstance(found, type):
        raise ConfigError(f"algorithm.advantage={path!r} is a {type(found).__name__}, not a class; name an estimator's class")
    return found


def _checked_options(name: str, chosen: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with their types checked against the class; an int where a float is wanted becomes one."""
    parameters = inspect.signature(chosen).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    types = _option_types(chosen)
    checked = {}
    for option, value in options.items():
        if option not in parameters and not takes_any:
            hint = nearest(option, parameters) if parameters else "it has none"
            raise ConfigError(f"algorithm.advantage_options.{option} is no option of {name}; {hint}")
        try:
            checked[option] = TypeAdapter(types[option]).validate_python(value, strict=True) if option in types else value
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"algorithm.advantage_options.{option}={value!r} doesn't fit {name}: {reason}") from error
    return checked


def _option_types(chosen: type[Any]) -> dict[str, Any]:
    """Annotations of the constructor; none when a user's class has some that can't be looked up."""
    try:
        return get_type_hints(chosen.__init__)
    except NameError:
        return {}
