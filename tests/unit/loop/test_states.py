"""Estimators that compare turns by state are refused where no state has a name, before anything heavy is loaded."""

from __future__ import annotations

import pytest

from polyturn.advantages.registry import build_estimator
from polyturn.config.schema import Recipe
from polyturn.environments.builtin.lookup import Lookup
from polyturn.errors import ConfigError
from polyturn.loop.check import check, refuse_without_states

RECIPE = Recipe.model_validate(
    {
        "run": {"steps": 1},
        "model": {"path": "builtin:tiny"},
        "environment": {"id": "lookup", "args": {"instructions": False}},
        "rollout": {"max_trajectory_tokens": 256},
        "algorithm": {"advantage": "gigpo"},
    }
)


class Nameless(Lookup):
    name = "nameless"
    names_states = False


def test_gigpo_needs_an_environment_that_names_its_states():
    estimator = build_estimator("gigpo", {})
    with pytest.raises(ConfigError, match="advantage=gigpo compares turns by their state, and environment nameless names none"):
        refuse_without_states(RECIPE, Nameless(instructions=False), estimator)
    refuse_without_states(RECIPE, Nameless(instructions=False), build_estimator("turn_rtg", {}))


def test_check_asks_for_it():
    assert check(RECIPE).estimator == build_estimator("gigpo", {})
    recipe = RECIPE.model_copy(
        update={"environment": RECIPE.environment.model_copy(update={"id": "unit.loop.test_states:Nameless"})}
    )
    with pytest.raises(ConfigError, match="names none; choose turn_rtg"):
        check(recipe)
