"""`trainer.parallel=auto` with several ranks: shards where whole copies don't fit this machine's GPUs, and shards do."""

from __future__ import annotations

from collections.abc import Mapping

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.plan.changes import changed, plan_on
from polyturn.plan.hardware import Machine
from polyturn.plan.here import known_here
from polyturn.plan.models import ModelFacts
from polyturn.plan.planner import GIB

_KEY = "trainer.parallel"


def shard_here(recipe: Recipe, *, num_tasks: int | None, smi: str = "nvidia-smi") -> tuple[Recipe, Mapping[str, str]]:
    """`recipe` with `fsdp2` where `auto` comes to that on this machine, and why, by dotted key; else as it was."""
    trainer = recipe.trainer
    known = known_here(recipe, smi=smi) if trainer.parallel == "auto" and trainer.num_ranks > 1 else None
    if known is None:
        return recipe, {}
    machine, facts = known
    return shard_on(recipe, facts, machine, num_tasks=num_tasks)


def shard_on(recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_tasks: int | None) -> tuple[Recipe, Mapping[str, str]]:
    """`recipe` with `fsdp2` where whole copies don't fit on `machine` and shards do; else as it was."""
    if recipe.trainer.parallel != "auto" or recipe.trainer.num_ranks == 1:
        return recipe, {}
    try:
        whole = plan_on(changed(recipe, {_KEY: "ddp"}), facts, machine, num_tasks=num_tasks)
        if not whole.problems(machine):
            return recipe, {}
        shards = plan_on(changed(recipe, {_KEY: "fsdp2"}), facts, machine, num_tasks=num_tasks)
    except ConfigError:
        return recipe, {}  # said by whoever resolves the recipe, if it is not only that shards can't be had with it
    if shards.problems(machine):
        return recipe, {}
    why = (
        f"whole copies need {whole.needed / GIB:.1f} GiB a GPU of the {machine.gpu.usable_bytes / GIB:.1f} there are "
        f"({machine.gpu_name}), shards {shards.needed / GIB:.1f}"
    )
    return changed(recipe, {_KEY: "fsdp2"}), {_KEY: why}
