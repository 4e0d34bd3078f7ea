"""`--prefer speed|memory|quality`: moves the numbers of a recipe within what fits, and says what it changed and why.

speed     placement, row length and recomputation with the least estimated seconds a step; the numbers learned are the same
memory    shortest rows, everything recomputed, a small optimizer, a small engine: the least bytes on the fullest GPU
quality   exact optimizer, more siblings, a longer context, as far as it fits; whatever costs only time pays for it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from polyturn.config.schema import Recipe, filled
from polyturn.errors import ConfigError
from polyturn.plan.automatic import settled_plan
from polyturn.plan.batch_words import batch_words
from polyturn.plan.changes import Change, changed, overrides
from polyturn.plan.hardware import Machine
from polyturn.plan.models import ModelFacts
from polyturn.plan.placement import is_paged
from polyturn.plan.planner import GIB, Plan
from polyturn.plan.speed import FILL, step_time
from polyturn.plan.splits import MOST_GPUS, split_changes

Goal: TypeAlias = Literal["speed", "memory", "quality"]

_ROWS = (8192, 16384, 32768)
_MODES = ("keep", "selective", "full")
_MOST_SIBLINGS = 16
_LONGEST = 32768
_GAIN = 0.98
_SMALL_BATCH = 32
_SHARES = tuple(percent / 100 for percent in range(10, 95, 5))
_KNOWN = {
    "trainer.activations": "what the backward pass computes again",
    "trainer.row_tokens": "longer or shorter rows (micro-batch)",
    "trainer.optimizer": "what the optimizer remembers",
    "trainer.master_weights": "what keeps small updates",
    "trainer.num_ranks": "placement",
    "engine.num_servers": "placement",
    "engine.kind": "placement",
    "engine.devices": "placement",
    "trainer.devices": "placement",
    "weight_sync.mode": "placement",
    "engine.max_batch_size": "sequences of the engine at once",
    "engine.gpu_memory_utilization": "the engine's share",
    "rollout.group_size": "siblings",
    "rollout.max_trajectory_tokens": "context",
    "model.quantize": "the whole base weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferred:
    """A recipe with what was moved."""

    recipe: Recipe
    changes: tuple[str, ...]
    """As overrides."""
    lines: tuple[str, ...]


def prefer(
    recipe: Recipe, facts: ModelFacts, machine: Machine, goal: Goal, *, num_tasks: int | None = None, fill: float = FILL
) -> Preferred:
    """`recipe` moved towards `goal` on `machine`. Raises ConfigError for a recipe that can't be planned at all."""
    trial = _Trial(recipe, facts, machine, num_tasks, fill)
    change = {"speed": _faster, "memory": _smaller, "quality": _better}[goal](trial)
    change = {key: value for key, value in change.items() if value != _value(recipe, key)}
    after = changed(recipe, change)
    return Preferred(recipe=after, changes=overrides(change), lines=tuple(_lines(trial, change, goal)))


class _Trial:
    """Plans of changed recipes."""

    def __init__(self, recipe: Recipe, facts: ModelFacts, machine: Machine, num_tasks: int | None, fill: float) -> None:
        self.recipe, self.facts, self.machine, self.num_tasks, self.fill = recipe, facts, machine, num_tasks, fill

    def plan(self, change: Change) -> Plan | None:
        """None where the change can't be had."""
        try:
            return settled_plan(changed(self.recipe, change), self.facts, self.machine, num_tasks=self.num_tasks)
        except ConfigError:
            if not change:
                raise
            return None

    def fits(self, change: Change) -> bool:
        plan = self.plan(change)
        return plan is not None and not plan.problems(self.machine)

    def seconds(self, change: Change) -> float:
        """Of a step that fits; infinite for one that does not."""
        plan = self.plan(change)
        if plan is None or plan.problems(self.machine):
            return float("inf")
        return step_time(plan, self.machine, fill=self.fill).seconds

    def needed(self, change: Change) -> float:
        plan = self.plan(change)
        return float("inf") if plan is None else plan.needed


def _faster(trial: _Trial) -> Change:
    best: Change = {}
    least = trial.seconds({})
    for place in ({}, *(change for _, change in split_changes(trial.recipe, trial.machine))):
        for neutral in _neutral(trial.recipe.rollout.max_trajectory_tokens):
            seconds = trial.seconds(place | neutral)
            if seconds < _GAIN * least:
                best, least = place | neutral, seconds
    return best


def _smaller(trial: _Trial) -> Change:
    recipe = trial.recipe
    change: Change = {"trainer.activations": "full", "trainer.row_tokens": recipe.rollout.max_trajectory_tokens}
    if recipe.model.lora is None and not recipe.trainer.offload_optimizer:
        change["trainer.optimizer"] = "adamw_8bit"
        if recipe.model.dtype == "bfloat16":
            change["trainer.master_weights"] = "stochastic"
    if not is_paged(recipe):
        change["engine.max_batch_size"] = min(_SMALL_BATCH, recipe.engine.max_batch_size)
    else:
        plans = ((share, trial.plan(change | {"engine.gpu_memory_utilization": share})) for share in _SHARES)
        enough = (share for share, plan in plans if plan is not None and not plan.short_contexts())
        share = next(enough, None)
        if share is not None:
            change["engine.gpu_memory_utilization"] = share
    for key in list(change):
        fewer = {other: value for other, value in change.items() if other != key}
        if trial.needed(fewer) <= trial.needed(change):
            change = fewer
    return change


def _better(trial: _Trial) -> Change:
    """Step by step, each only where something that costs time alone makes room for it."""
    change: Change = {}
    for step in _finer(trial.recipe, trial.facts):
        context = (change | step).get("rollout.max_trajectory_tokens", trial.recipe.rollout.max_trajectory_tokens)
        options = ({}, *_neutral(context))
        found = next((change | step | neutral for neutral in options if trial.fits(change | step | neutral)), None)
        if found is not None:
            change = found
    return change


def _finer(recipe: Recipe, facts: ModelFacts) -> Iterator[Change]:
    """What makes what is learned better, the cheapest first."""
    if recipe.trainer.optimizer == "adamw_8bit":
        yield {"trainer.optimizer": "adamw"}
    if recipe.trainer.master_weights in ("stochastic", "none"):
        yield {"trainer.master_weights": "auto"}
    if recipe.model.quantize is not None:
        yield {"model.quantize": None}
    if recipe.rollout.group_size < _MOST_SIBLINGS:
        yield {"rollout.group_size": _MOST_SIBLINGS}
    context = 2 * recipe.rollout.max_trajectory_tokens
    while context <= min(_LONGEST, facts.max_positions or _LONGEST):
        yield {"rollout.max_trajectory_tokens": context}
        context *= 2


def _neutral(context: int) -> Iterator[Change]:
    """Changes that leave the numbers alone and cost time or memory: what is computed again, and the length of a row."""
    lengths = sorted({max(context, row) for row in (context, *_ROWS)})
    for mode in _MODES:
        for row in reversed(lengths):
            yield {"trainer.activations": mode, "trainer.row_tokens": row}


def _value(recipe: Recipe, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def _lines(trial: _Trial, change: Change, goal: Goal) -> Iterator[str]:
    """What was changed, and what came of it."""
    before, after = trial.plan({}), trial.plan(change)
    assert before is not None
    if not change or after is None:
        why = "nothing known makes it fit" if before.problems(trial.machine) else "nothing known is better"
        untried = f"; placements are tried on {MOST_GPUS} GPUs at most" if trial.machine.total > MOST_GPUS else ""
        yield f"--prefer {goal}: nothing is changed: {why}{untried}."
        return
    for key, value in change.items():
        yield f"--prefer {goal}: {key} {_value(trial.recipe, key)} -> {value} ({_KNOWN[key]})"
    yield f"--prefer {goal}: the same as {' '.join(overrides(change))}"
    old, new = batch_words(before.recipe), batch_words(after.recipe)
    seconds = [step_time(plan, trial.machine, fill=trial.fill).seconds for plan in (before, after)]
    yield (
        f"--prefer {goal}: micro-batch {filled(before.recipe.trainer.row_tokens):,} -> "
        f"{filled(after.recipe.trainer.row_tokens):,} tokens, accumulation {old.gradient_accumulation_steps} -> "
        f"{new.gradient_accumulation_steps} rows, siblings {old.num_generations} -> {new.num_generations}; fullest GPU "
        f"{before.needed / GIB:.1f} -> {after.needed / GIB:.1f} GiB, about {seconds[0]:,.1f} -> {seconds[1]:,.1f} s a step"
    )
