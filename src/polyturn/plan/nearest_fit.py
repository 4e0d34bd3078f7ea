"""The smallest change to a recipe that makes it fit: what costs time before what costs quality, and a smaller context last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from polyturn.config.schema import LoraSection, Recipe
from polyturn.errors import ConfigError
from polyturn.plan.hardware import Hardware, Machine
from polyturn.plan.models import ModelFacts
from polyturn.plan.planner import make_plan

Change: TypeAlias = "dict[str, Any]"
"""New values by dotted key, such as `trainer.activations`."""

_SHORTEST = 256


def nearest_fit(recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_tasks: int | None = None) -> tuple[str, ...] | None:
    """Overrides, as the command line takes them, with which `recipe` fits on `machine`; None when nothing known does."""

    def fits(change: Change) -> bool:
        try:
            return not make_plan(changed(recipe, change), facts, num_tasks=num_tasks).problems(machine)
        except ConfigError:
            return False  # the recipe asks for something that can't be had together with it

    for change in _changes(recipe, facts, machine):
        if fits(change):
            return tuple(f"{key}={_word(value)}" for key, value in _needed(change, fits).items())
    return None


def smallest_gpu(recipe: Recipe, facts: ModelFacts, hardware: Hardware, *, num_tasks: int | None = None) -> str | None:
    """The kind of GPU with the least memory on which `recipe` fits as it is; None when none is large enough."""
    plan = make_plan(recipe, facts, num_tasks=num_tasks)
    fitting = [(gpu.usable_bytes, name) for name, gpu in hardware.gpus.items() if plan.fits_on(gpu)]
    return min(fitting)[1] if fitting else None


def changed(recipe: Recipe, change: Mapping[str, Any]) -> Recipe:
    """`recipe` with new values by dotted key; `model.lora.rank` brings the section where there is none."""
    for key, value in change.items():
        section, _, name = key.partition(".")
        update = {"lora": LoraSection(rank=value)} if key == "model.lora.rank" else {name: value}
        recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=update)})
    return recipe


def _needed(change: Change, fits: Callable[[Change], bool]) -> Change:
    """`change` without what it fits without, tried from what hurts most."""
    for key in reversed(list(change)):
        fewer = {other: value for other, value in change.items() if other != key}
        if fits(fewer):
            change = fewer
    return change


def _changes(recipe: Recipe, facts: ModelFacts, machine: Machine) -> Iterator[Change]:
    """Changes in the order in which they hurt."""
    count = _fewer_gpus(recipe, machine)
    positions = facts.max_positions
    context = recipe.rollout.max_trajectory_tokens
    if positions is not None and context > positions:
        count |= _context(recipe, positions)
        context = positions
    yield from _with_smaller_batches(recipe, count)
    for saving in _savings(recipe, context):
        yield from _with_smaller_batches(recipe, count | saving)
    hardest = {"trainer.activations": "full", "trainer.optimizer": "adamw_8bit", "trainer.master_weights": "stochastic"}
    shorter = context // 2
    while shorter >= _SHORTEST:
        cut = _half(recipe) | {"trainer.row_tokens": shorter} | _context(recipe, shorter)
        yield from _with_smaller_batches(recipe, count | cut | ({} if recipe.model.lora else hardest))
        shorter //= 2


def _savings(recipe: Recipe, context: int) -> Iterator[Change]:
    """Ways to hold less on a GPU, each on top of what costs less."""
    half = _half(recipe)
    yield half
    modes = ["keep", "selective", "full"]
    work: Change = dict(half)
    for mode in modes[modes.index(recipe.trainer.activations) + 1 :]:
        work = half | {"trainer.activations": mode}
        yield work
    if recipe.trainer.row_tokens is None or recipe.trainer.row_tokens > context:
        work |= {"trainer.row_tokens": context}
        yield work
    if recipe.model.lora is None:
        small = work | {"trainer.optimizer": "adamw_8bit"}
        yield small
        yield small | {"trainer.master_weights": "stochastic"}
        yield work | {"trainer.offload_optimizer": True}
        yield work | {"model.lora.rank": 16}
        work |= {"model.lora.rank": 16}
    if recipe.model.quantize is None:
        yield work | {"model.quantize": "8bit"}
    if recipe.model.quantize != "4bit":
        yield work | {"model.quantize": "4bit"}


def _with_smaller_batches(recipe: Recipe, change: Change) -> Iterator[Change]:
    """`change`, and `change` with fewer sequences in the engine at once."""
    if change:
        yield change
    size = min(128, recipe.engine.max_batch_size // 2)
    while size >= 8:
        yield change | {"engine.max_batch_size": size}
        size //= 2


def _half(recipe: Recipe) -> Change:
    return {} if recipe.model.dtype == "bfloat16" else {"model.dtype": "bfloat16"}


def _context(recipe: Recipe, tokens: int) -> Change:
    """A trajectory of `tokens` at most, and turns that are no longer."""
    change: Change = {"rollout.max_trajectory_tokens": tokens}
    if recipe.rollout.max_turn_tokens > tokens:
        change["rollout.max_turn_tokens"] = tokens
    return change


def _fewer_gpus(recipe: Recipe, machine: Machine) -> Change:
    """Ranks and servers that the machine has GPUs for."""
    ranks, servers = recipe.trainer.num_ranks, recipe.engine.num_servers if recipe.engine.kind == "hf_server" else 0
    if ranks + servers <= machine.count:
        return {}
    change: Change = {}
    if servers and machine.count == 1:
        change["engine.kind"], servers = "hf", 0
    elif servers >= machine.count:
        change["engine.num_servers"] = servers = machine.count - 1
    if ranks + servers > machine.count:
        change["trainer.num_ranks"] = machine.count - servers
    return change


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
