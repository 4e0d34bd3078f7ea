"""`engine.sleep=auto`: the engine in the trainer's process sleeps while training, where both don't fit on the GPU otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.plan.changes import changed, plan_on
from polyturn.plan.hardware import Machine
from polyturn.plan.here import known_here
from polyturn.plan.models import ModelFacts
from polyturn.plan.planner import GIB

_KEY = "engine.sleep"


def sleep_here(recipe: Recipe, *, num_tasks: int | None, smi: str = "nvidia-smi") -> tuple[Recipe, Mapping[str, str]]:
    """`recipe` with `engine.sleep=on` where `auto` comes to that on this machine, and why, by dotted key; else as it was."""
    known = known_here(recipe, smi=smi) if _is_open(recipe) else None
    if known is None:
        return recipe, {}
    machine, facts = known
    return sleep_on(recipe, facts, machine, num_tasks=num_tasks)


def sleep_on(recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_tasks: int | None) -> tuple[Recipe, Mapping[str, str]]:
    """`recipe` with `engine.sleep=on` where that is what makes it fit on `machine`; else as it was."""
    if not _is_open(recipe):
        return recipe, {}
    try:
        awake = plan_on(changed(recipe, {_KEY: "off"}), facts, machine, num_tasks=num_tasks)
        asleep = plan_on(changed(recipe, {_KEY: "on"}), facts, machine, num_tasks=num_tasks)
    except ConfigError:
        return recipe, {}  # said by whoever resolves the recipe
    if not awake.problems(machine) or asleep.problems(machine):
        return recipe, {}
    why = (
        f"{awake.needed / GIB:.1f} GiB of {machine.gpu.usable_bytes / GIB:.1f} are needed while the engine is awake "
        f"({machine.gpu_name}), {asleep.needed / GIB:.1f} when it sleeps while training"
    )
    return changed(recipe, {_KEY: "on"}), {_KEY: why}


def _is_open(recipe: Recipe) -> bool:
    engine = recipe.engine
    return engine.kind == "vllm" and engine.device is None and engine.sleep == "auto"
