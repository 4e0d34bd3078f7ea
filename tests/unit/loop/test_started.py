"""A rank that torchrun started: what its variables must say."""

from __future__ import annotations

import pytest

from polyturn.config.schema import EnvironmentSection, ModelSection, Recipe, with_values
from polyturn.errors import ConfigError
from polyturn.loop.started import as_rank

GIVEN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
RECIPE = Recipe(model=ModelSection(path="builtin:tiny"), environment=EnvironmentSection(id="lookup"))


def test_the_ranks_are_those_that_were_started():
    rank, recipe = as_rank(RECIPE, GIVEN)
    assert (rank, recipe.trainer.num_ranks) == (1, 4)
    assert as_rank(with_values(RECIPE, "trainer", num_ranks=4), GIVEN)[0] == 1


@pytest.mark.parametrize(
    ("recipe", "environ", "words"),
    [
        (RECIPE, {**GIVEN, "MASTER_PORT": ""}, "MASTER_PORT is not"),
        (RECIPE, {**GIVEN, "RANK": "one"}, "RANK=one"),
        (with_values(RECIPE, "trainer", num_ranks=2), GIVEN, "trainer.num_ranks=2, and 4 ranks"),
        (with_values(RECIPE, "engine", kind="hf_server"), GIVEN, "engine.kind=hf_server under torchrun"),
        (with_values(RECIPE, "environment", num_processes=2), GIVEN, "environment.num_processes=2 under torchrun"),
    ],
)
def test_what_does_not_go_together_is_refused(recipe, environ, words):
    with pytest.raises(ConfigError, match=words):
        as_rank(recipe, environ)
