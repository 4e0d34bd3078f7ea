"""What a recipe leaves to the machine: whole copies or shards, memory, sleep. Plans that are compared have it settled."""

from __future__ import annotations

from collections.abc import Mapping

from polyturn.config.schema import Recipe
from polyturn.plan.auto_memory import fit_memory
from polyturn.plan.auto_parallel import shard_on
from polyturn.plan.auto_sleep import sleep_on
from polyturn.plan.changes import plan_on
from polyturn.plan.hardware import Machine
from polyturn.plan.models import ModelFacts
from polyturn.plan.planner import Plan


def settle(recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_tasks: int | None) -> tuple[Recipe, Mapping[str, str]]:
    """`recipe` with what its `auto` come to on `machine`, and why, by dotted key. Raises ConfigError."""
    recipe, chosen = shard_on(recipe, facts, machine, num_tasks=num_tasks)
    if recipe.trainer.memory == "auto":
        recipe, fitted = fit_memory(recipe, facts, machine, num_tasks=num_tasks)
        chosen = {**chosen, **fitted}
    recipe, asleep = sleep_on(recipe, facts, machine, num_tasks=num_tasks)
    return recipe, {**chosen, **asleep}


def settled_plan(recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_tasks: int | None = None) -> Plan:
    """The plan of what would run on `machine`. Raises ConfigError."""
    settled, _ = settle(recipe, facts, machine, num_tasks=num_tasks)
    return plan_on(settled, facts, machine, num_tasks=num_tasks)
