"""Changes to a recipe by dotted key: made, planned, and said as overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from polyturn.config.schema import LoraSection, Recipe
from polyturn.plan.hardware import Machine
from polyturn.plan.models import ModelFacts
from polyturn.plan.planner import Plan, make_plan

Change: TypeAlias = "dict[str, Any]"
"""New values by dotted key, such as `trainer.activations`."""


def plan_on(recipe: Recipe, facts: ModelFacts, machine: Machine | None, *, num_tasks: int | None = None) -> Plan:
    """The plan of `recipe` on the GPUs of `machine`. Raises ConfigError."""
    if machine is None:
        return make_plan(recipe, facts, num_tasks=num_tasks)
    return make_plan(recipe, facts, machine.gpu, gpu_name=machine.gpu_name, total=machine.total, num_tasks=num_tasks)


def changed(recipe: Recipe, change: Mapping[str, Any]) -> Recipe:
    """`recipe` with new values by dotted key; `model.lora.rank` brings the section where there is none."""
    for key, value in change.items():
        section, _, name = key.partition(".")
        update = {"lora": LoraSection(rank=value)} if key == "model.lora.rank" else {name: value}
        if name.startswith("extra_args."):
            update = {"extra_args": {**recipe.engine.extra_args, name.removeprefix("extra_args."): value}}
        recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=update)})
    return recipe


def overrides(change: Change) -> tuple[str, ...]:
    """`change` as the command line takes it."""
    return tuple(f"{key}={_word(value)}" for key, value in change.items())


def differences(recipe: Recipe, change: Change) -> Change:
    """What of `change` differs from the recipe."""

    def value(key: str) -> Any:
        if key == "model.lora.rank":
            return None if recipe.model.lora is None else recipe.model.lora.rank
        section, _, name = key.partition(".")
        return getattr(getattr(recipe, section), name)

    return {key: new for key, new in change.items() if value(key) != new}


def _word(value: Any) -> str:
    """As YAML has it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
