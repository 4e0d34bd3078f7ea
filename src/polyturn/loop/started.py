"""A rank that somebody else started: torchrun on one machine or several, or whatever sets its variables."""

from __future__ import annotations

from collections.abc import Mapping

from polyturn.config.schema import Recipe, with_values
from polyturn.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def as_rank(recipe: Recipe, environ: Mapping[str, str]) -> tuple[int, Recipe]:
    """The number of this rank by `environ`, and `recipe` with as many ranks as there are.

    Raises ConfigError for variables that are missing or no numbers, another number of ranks in the recipe, and processes that
    only `polyturn launch` starts.
    """
    missing = [name for name in _VARIABLES if not environ.get(name)]
    if missing:
        raise ConfigError(f"RANK and WORLD_SIZE are set, and {missing[0]} is not; start all ranks with torchrun, or unset RANK")
    if not (environ["RANK"].isdigit() and environ["WORLD_SIZE"].isdigit()):
        raise ConfigError(f"RANK={environ['RANK']} of WORLD_SIZE={environ['WORLD_SIZE']}: both must be whole numbers")
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if "num_ranks" in recipe.trainer.model_fields_set and recipe.trainer.num_ranks != size:
        raise ConfigError(
            f"trainer.num_ranks={recipe.trainer.num_ranks}, and {size} ranks were started (WORLD_SIZE); remove it, or start "
            "as many"
        )
    if recipe.engine.kind == "hf_server" or (recipe.engine.kind == "vllm_server" and not recipe.engine.urls):
        raise ConfigError(
            f"engine.kind={recipe.engine.kind} under torchrun: it starts ranks only; use servers that run already "
            "(engine.kind=vllm_server with engine.urls), engine.kind=hf, or `polyturn launch local` without torchrun"
        )
    if recipe.environment.num_processes:
        raise ConfigError(
            f"environment.num_processes={recipe.environment.num_processes} under torchrun: it starts ranks only; set it to "
            "0, or use `polyturn launch local` without torchrun"
        )
    return rank, with_values(recipe, "trainer", num_ranks=size)
