"""The environment of a recipe: built, with the recipe's rewards, and mixed with the others it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.config.schema import Recipe, RewardEntry
from polyturn.environments import build_environment
from polyturn.environments.base import Environment
from polyturn.environments.mixed import Mixed
from polyturn.environments.rewarded import Rewarded
from polyturn.environments.rewards.registry import Resources, build_rewards
from polyturn.errors import EnvironmentSetupError


def recipe_environment(recipe: Recipe, resources: Resources | None = None) -> Environment:
    """The environment that plays a recipe's tasks. `resources` are what rewards may ask for, such as a sandbox.

    Raises:
        ConfigError, EnvironmentSetupError: an environment or a reward that can't be built, or nothing that scores.
    """
    main = recipe.environment
    first = _part(main.id, main.args, main.rewards, resources)
    if not recipe.data.mix:
        return first
    parts = {first.name: first}
    for entry in recipe.data.mix:
        environment = _part(entry.environment, entry.args, entry.rewards, resources)
        name = entry.name or environment.name
        if name in parts:
            raise EnvironmentSetupError(f"two parts of data.mix are called {name!r}; give one a name of its own, as in name: b")
        parts[name] = environment
    return Mixed(parts)


def component_weights(recipe: Recipe) -> dict[str, float]:
    """Weight of each outcome component that has one: those of the rewards, then `environment.reward_weights`.

    Raises:
        EnvironmentSetupError: two parts of a mix weigh a component differently.
    """
    weights: dict[str, float] = {}
    for entry in (*recipe.environment.rewards, *(entry for part in recipe.data.mix for entry in part.rewards)):
        if entry.per == "trajectory" and weights.setdefault(entry.component, entry.weight) != entry.weight:
            raise EnvironmentSetupError(
                f"two parts of data.mix weigh the reward {entry.component} {weights[entry.component]:g} and {entry.weight:g}; "
                "give one another name"
            )
    return weights | recipe.environment.reward_weights


def _part(
    environment_id: str, args: Mapping[str, Any], rewards: Sequence[RewardEntry], resources: Resources | None
) -> Environment:
    environment = build_environment(environment_id, args)
    built = build_rewards(rewards, resources)
    if built:
        environment = Rewarded(environment, built)
    if not environment.scores:
        raise EnvironmentSetupError(
            f"environment {environment.name} scores nothing itself; list a reward under environment.rewards, "
            "such as {path: exact_match}"
        )
    return environment
