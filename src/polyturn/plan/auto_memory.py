"""`trainer.memory=auto`: what leaves the numbers alone and saves memory, until training fits on this machine's GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.plan.changes import Change, changed, plan_on
from polyturn.plan.hardware import Machine
from polyturn.plan.here import known_here
from polyturn.plan.models import ModelFacts
from polyturn.plan.planner import GIB

_MODES = ("keep", "selective", "full")
_ROWS = (None, 4096, 2048, 1024, 512)
"""None: the usual row. Shorter ones are slower on a GPU."""
_KEYS = ("trainer.activations", "trainer.row_tokens", "trainer.offload_optimizer")


def fit_here(recipe: Recipe, *, num_tasks: int | None, smi: str = "nvidia-smi") -> tuple[Recipe, Mapping[str, str]]:
    """`recipe` with what `trainer.memory=auto` chooses on this machine, and why, by dotted key.

    Without `auto`, without a GPU, or where model or GPU are not known, the recipe comes back as it was.
    """
    known = known_here(recipe, smi=smi) if recipe.trainer.memory == "auto" else None
    if known is None:
        return recipe, {}
    machine, facts = known
    return fit_memory(recipe, facts, machine, num_tasks=num_tasks)


def fit_memory(
    recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_tasks: int | None
) -> tuple[Recipe, Mapping[str, str]]:
    """`recipe` with the first choice that fits on `machine`, of the keys that it leaves open; itself when none does."""
    before: float | None = None
    for change in _choices(recipe):
        try:
            plan = plan_on(changed(recipe, change), facts, machine, num_tasks=num_tasks)
        except ConfigError:
            continue
        before = plan.needed if before is None else before
        if not plan.problems(machine):
            why = (
                f"trainer.memory=auto: {plan.needed / GIB:.1f} GiB of {machine.gpu.usable_bytes / GIB:.1f} are needed so "
                f"({machine.gpu_name}), {before / GIB:.1f} without"
            )
            return changed(recipe, change), dict.fromkeys(change, why)
    return recipe, {}


def _choices(recipe: Recipe) -> Iterator[Change]:
    """From what costs least time to what costs most; nothing that the recipe says itself is touched."""
    given = recipe.trainer.model_fields_set
    longest = recipe.rollout.max_trajectory_tokens
    for offload in (False, True):
        for row in _ROWS:
            for mode in _MODES:
                change: Change = {"trainer.activations": mode, "trainer.row_tokens": row, "trainer.offload_optimizer": offload}
                if row is not None and row < longest:
                    continue
                open_keys = {key: value for key, value in change.items() if key.partition(".")[2] not in given}
                yield {key: value for key, value in open_keys.items() if value not in (None, False, "keep")}
