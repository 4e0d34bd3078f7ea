"""The smallest change to a recipe that makes it fit: what costs time before what costs quality, and a smaller context last."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError
from polyturn.plan.automatic import settled_plan
from polyturn.plan.changes import Change, changed, overrides, plan_on
from polyturn.plan.engine_load import OWN_SHARE
from polyturn.plan.hardware import MOST_GPUS, Gpu, Hardware, Machine
from polyturn.plan.models import ModelFacts
from polyturn.plan.placement import is_paged, is_server, num_engines, tensor_parallel
from polyturn.plan.planner import make_plan, room

_SHORTEST = 256
_TRIAL = 2048
"""Tokens of a small trial batch: vLLM's own choice on small GPUs."""
_SHARE_STEP = 0.05
_PARTS = (1, 2, 4, 8)
_SHARED: Change = {"trainer.devices": (0,), "engine.devices": (0,)}
"""A server on the trainer's own GPU."""


def nearest_fit(recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_tasks: int | None = None) -> tuple[str, ...] | None:
    """Overrides, as the command line takes them, with which `recipe` fits on `machine`; None when nothing known does."""
    fits = partial(_fits, recipe, facts, machine, num_tasks)
    for change in _changes(recipe, facts, machine):
        if fits(change):
            return overrides(_needed(change, fits))
    return None


def only_needed(
    recipe: Recipe, facts: ModelFacts, machine: Machine, change: Change, *, num_tasks: int | None = None
) -> tuple[str, ...]:
    """Of a change with which `recipe` fits what is needed for that, as overrides."""
    return overrides(_needed(change, partial(_fits, recipe, facts, machine, num_tasks)))


def _fits(recipe: Recipe, facts: ModelFacts, machine: Machine, num_tasks: int | None, change: Change) -> bool:
    try:
        return not settled_plan(changed(recipe, change), facts, machine, num_tasks=num_tasks).problems(machine)
    except ConfigError:
        return False  # the recipe asks for something that can't be had together with it


def smallest_gpu(recipe: Recipe, facts: ModelFacts, hardware: Hardware, *, num_tasks: int | None = None) -> str | None:
    """The kind of GPU with the least memory on which `recipe` fits as it is; None when none is large enough."""
    numbers = [number for gpu in make_plan(recipe, facts, num_tasks=num_tasks).gpus for number in gpu.numbers]

    def fits(name: str, gpu: Gpu) -> bool:
        machine = hardware.gpus_alone(name, max(numbers) + 1)
        return settled_plan(recipe, facts, machine, num_tasks=num_tasks).fits_on(gpu)

    if max(numbers) >= MOST_GPUS:
        return None
    by_size = sorted(hardware.gpus.items(), key=lambda named: (named[1].usable_bytes, named[0]))
    return next((name for name, gpu in by_size if fits(name, gpu)), None)


def _needed(change: Change, fits: Callable[[Change], bool]) -> Change:
    """`change` without what it fits without, tried from what hurts most, until each is needed beside the others.

    Once is not enough: what goes may bring shards for whole copies, and then something else can go too.
    """
    before: Change = {}
    while before != change:
        before = change
        for key in reversed(list(change)):
            fewer = {other: value for other, value in change.items() if other != key}
            if fits(fewer):
                change = fewer
    return change


def _changes(recipe: Recipe, facts: ModelFacts, machine: Machine) -> Iterator[Change]:
    """Changes in the order in which they hurt."""
    places = list(_places(recipe, machine))
    positions = facts.max_positions
    context = recipe.rollout.max_trajectory_tokens
    cut: Change = {}
    if positions is not None and context > positions:
        context = positions
        cut = _context(recipe, positions)
    for saving in ({}, *_savings(recipe, context, machine)):
        for place in places:
            yield from _smaller_engines(recipe, facts, machine, place | cut | saving)
    shorter = context // 2
    while shorter >= _SHORTEST:
        cut = _half(recipe) | {"trainer.row_tokens": shorter} | _context(recipe, shorter)
        for saving in _hardest(recipe, machine):
            for place in places:
                yield from _smaller_engines(recipe, facts, machine, place | cut | saving)
        shorter //= 2


def _hardest(recipe: Recipe, machine: Machine) -> Iterator[Change]:
    """What a shorter context is tried with: all that saves memory, for the weights that are trained, then for adapters."""
    full: Change = {"trainer.activations": "full"}
    if recipe.model.lora is not None:
        yield full
        return
    if not recipe.trainer.offload_optimizer:
        yield full | {"trainer.optimizer": "adamw_8bit", "trainer.master_weights": "stochastic"}
    yield full | _adapters(recipe, machine)


def _places(recipe: Recipe, machine: Machine) -> Iterator[Change]:
    """Other placements of the same ranks and engines, and of fewer where the machine has too few GPUs."""
    fewer = _fewer_gpus(recipe, machine)
    yield fewer
    spare = machine.total - recipe.trainer.num_ranks - num_engines(recipe) * tensor_parallel(recipe)
    if is_server(recipe) and recipe.trainer.devices is None and recipe.engine.devices is None and spare > 0:
        yield {"trainer.num_ranks": recipe.trainer.num_ranks + spare}
    if not is_server(recipe) or recipe.engine.kind == "hf_server":
        return
    ranks = fewer.get("trainer.num_ranks", recipe.trainer.num_ranks)
    apart: Change = {"weight_sync.mode": "auto"} if recipe.weight_sync.mode != "auto" else {}
    if recipe.engine.devices is not None:
        apart["engine.devices"] = None
    if recipe.trainer.tensor_ranks > 1:  # layers are cut as the server's are; other numbers of GPUs want another cut
        apart |= {"trainer.parallel": "auto", "trainer.tensor_ranks": 1, "trainer.devices": None}
    if apart:
        yield fewer | apart
    for parts in sorted(_PARTS, key=lambda parts: abs(parts - tensor_parallel(recipe))):
        if parts < min(machine.count + 1, machine.total):
            counts = {
                "engine.tensor_parallel_size": (parts, recipe.engine.tensor_parallel_size),
                "engine.num_servers": (1, recipe.engine.num_servers),
                "trainer.num_ranks": (max(1, min(ranks, machine.total - parts)), recipe.trainer.num_ranks),
            }
            yield fewer | apart | {key: new for key, (new, old) in counts.items() if new != old}


def _savings(recipe: Recipe, context: int, machine: Machine) -> Iterator[Change]:
    """Ways to hold less on a GPU, each on top of what costs less. An offload only where the machine's own memory is known."""
    half = _half(recipe)
    yield half
    if recipe.engine.kind == "vllm" and recipe.engine.device is None and recipe.engine.sleep != "on":
        yield half | {"engine.sleep": "on"}
    modes = ["keep", "selective", "full"]
    work: Change = dict(half)
    for mode in modes[modes.index(recipe.trainer.activations) + 1 :]:
        work = half | {"trainer.activations": mode}
        yield work
    if recipe.trainer.row_tokens is None or recipe.trainer.row_tokens > context:
        work = work | {"trainer.row_tokens": context}
        yield work
    if recipe.model.lora is None:
        small = work | {"trainer.optimizer": "adamw_8bit"}
        yield small
        yield small | {"trainer.master_weights": "stochastic"}
        if machine.ram_bytes is not None:
            yield work | {"trainer.offload_optimizer": True}
        adapters = _adapters(recipe, machine)
        yield work | adapters
        work = work | adapters
    if recipe.model.quantize is None:
        yield work | {"model.quantize": "8bit"}
    if recipe.model.quantize != "4bit":
        yield work | {"model.quantize": "4bit"}


def _adapters(recipe: Recipe, machine: Machine) -> Change:
    """Adapters, and an engine that can take them: vLLM loads them as files, in a process of its own."""
    change: Change = {"model.lora.rank": 16}
    if is_paged(recipe) and recipe.weight_sync.mode != "auto":
        change["weight_sync.mode"] = "lora"
    if recipe.engine.kind == "vllm" or (is_paged(recipe) and machine.total == 1):
        change["engine.kind"] = "vllm_server"
        if recipe.engine.device is None:
            change |= _SHARED
    return change


def _smaller_engines(recipe: Recipe, facts: ModelFacts, machine: Machine, change: Change) -> Iterator[Change]:
    """`change`, and `change` with an engine that takes less: fewer sequences at once, or a share that is just enough."""
    if change:
        yield change
    if is_paged(recipe):
        yield from _other_shares(recipe, facts, machine, change)
        return
    size = min(128, recipe.engine.max_batch_size // 2)
    while size >= 8:
        yield change | {"engine.max_batch_size": size}
        size //= 2


def _other_shares(recipe: Recipe, facts: ModelFacts, machine: Machine, change: Change) -> Iterator[Change]:
    """Shares of the GPU with which the engine holds one whole context, with its trial batch and with a small one."""
    try:
        plan = plan_on(changed(recipe, change), facts, machine)
    except ConfigError:
        return
    generating = [gpu for gpu in plan.gpus if gpu.engine is not None]
    if not plan.short_contexts() and all(gpu.needed <= room(machine.gpu) for gpu in generating):
        return  # another share would help nobody
    for trial in ({}, {"engine.extra_args.max_num_batched_tokens": _TRIAL}):
        bare = make_plan(changed(recipe, change | trial), facts).gpus
        least = max((gpu.engine.budget for gpu in bare if gpu.engine is not None), default=0.0)
        share = math.ceil(least / machine.gpu.usable_bytes / _SHARE_STEP) * _SHARE_STEP
        if trial:
            yield change | trial
        for roomier in (share + 2 * _SHARE_STEP, share):
            if 0 < roomier <= OWN_SHARE + _SHARE_STEP:
                yield change | trial | {"engine.gpu_memory_utilization": round(roomier, 2)}


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
    ranks, servers = recipe.trainer.num_ranks, num_engines(recipe) if is_server(recipe) else 0
    parts, change = tensor_parallel(recipe), dict[str, Any]()
    shared = recipe.weight_sync.mode == "single_copy" or recipe.engine.devices is not None
    needed = max(ranks, servers * parts) if shared and servers else ranks + servers * parts
    if recipe.engine.kind == "vllm" and recipe.engine.device is not None:
        needed = ranks + 1
    if needed <= machine.total and parts <= machine.count:
        return change
    if servers and machine.total == 1:
        return _one_gpu(recipe)
    while parts > 1 and parts >= machine.total:
        change["engine.tensor_parallel_size"] = parts = parts // 2
    if servers * parts >= machine.total:
        change["engine.num_servers"] = servers = max(1, (machine.total - 1) // parts)
    if ranks + servers * parts > machine.total:
        change["trainer.num_ranks"] = max(1, machine.total - max(servers * parts, int(needed > ranks and not servers)))
    return change


def _one_gpu(recipe: Recipe) -> Change:
    """An engine in the driver's process, where there is one GPU for both; one that takes adapters is a server beside it."""
    change: Change = {"engine.kind": "hf" if recipe.engine.kind == "hf_server" else "vllm"}
    if recipe.model.lora is not None and recipe.engine.kind == "vllm_server":
        change = dict(_SHARED)
    elif recipe.engine.devices is not None:
        change["engine.devices"] = None
    if recipe.trainer.num_ranks > 1:
        change["trainer.num_ranks"] = 1
    if recipe.engine.tensor_parallel_size > 1:
        change["engine.tensor_parallel_size"] = 1
    if recipe.engine.num_servers > 1:
        change["engine.num_servers"] = 1
    if recipe.weight_sync.mode != "auto":
        change["weight_sync.mode"] = "auto"
    return change
