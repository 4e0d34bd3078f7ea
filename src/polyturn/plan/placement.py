"""Which GPU trains, which one generates, and how the weights get from the one to the other.

An engine in the driver's process (`hf`, `vllm`) lies on the first rank's GPU, unless `engine.device` names another one. Servers
have GPUs of their own, the last ones of the machine, unless `engine.devices` names some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyturn.config.schema import Recipe
from polyturn.plan.models import ModelFacts

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What one GPU is for. A GPU may have both."""

    number: int
    """Among the GPUs of all nodes."""
    rank: int | None = None
    """Of the trainer."""
    engine: int | None = None
    """Number of a server, 0 for an engine in the driver's process."""

    @property
    def shared(self) -> bool:
        """Whether it trains and generates."""
        return self.rank is not None and self.engine is not None


def num_engines(recipe: Recipe) -> int:
    """Engines that the run starts; servers of others are not counted."""
    if recipe.engine.kind == "vllm_server" and recipe.engine.urls:
        return 0
    return recipe.engine.num_servers if is_server(recipe) else 1


def is_server(recipe: Recipe) -> bool:
    """Whether engines are processes of their own."""
    return recipe.engine.kind in ("hf_server", "vllm_server")


def is_paged(recipe: Recipe) -> bool:
    """Whether engines take a share of their GPU and page their cache."""
    return recipe.engine.kind in ("vllm", "vllm_server")


def tensor_parallel(recipe: Recipe) -> int:
    """GPUs of one engine."""
    return recipe.engine.tensor_parallel_size if recipe.engine.kind == "vllm_server" else 1


def seats(recipe: Recipe, total: int | None = None) -> tuple[Seat, ...]:
    """Every GPU of a resolved recipe, by number. `total` are those of the machine; without them servers follow the ranks."""
    ranks, engines = _ranks(recipe), _engines(recipe, total)
    numbers = sorted({*ranks, *engines})
    return tuple(Seat(number=number, rank=ranks.get(number), engine=engines.get(number)) for number in numbers)


def role(alike: list[Seat], recipe: Recipe) -> str:
    """Name of GPUs that hold the same, such as `trainer-0 and the engine`, `trainer-1 to trainer-3`."""
    ranks = sorted(seat.rank for seat in alike if seat.rank is not None)
    engines = sorted({seat.engine for seat in alike if seat.engine is not None})
    names = [_span("trainer", ranks)] if ranks else []
    if engines:
        parts = tensor_parallel(recipe)
        shared = f" on {parts} GPUs{' each' if len(engines) > 1 else ''}" if parts > 1 else ""
        names.append(_span("engine", engines) + shared if is_server(recipe) else "the engine")
    return " and ".join(names)


def refusals(recipe: Recipe, facts: ModelFacts) -> Iterator[str]:
    """What can't be placed so on any machine, a sentence each: value, rule, fix. The recipe is resolved."""
    yield from _parallel_refusals(recipe, facts)
    where, mode = seats(recipe), recipe.weight_sync.mode
    shared = [seat for seat in where if seat.shared]
    devices, ranks = recipe.trainer.devices, recipe.trainer.num_ranks
    if devices is not None and len(devices) != ranks:
        yield f"trainer.devices={list(devices)} has {len(devices)} GPUs for trainer.num_ranks={ranks}; name one for each"
    devices = recipe.engine.devices
    count = num_engines(recipe) * tensor_parallel(recipe)
    if is_server(recipe) and devices is not None and len(devices) != count:
        yield f"engine.devices={list(devices)} has {len(devices)} GPUs for {count}, those of all servers; name one for each"
    senders = [seat for seat in shared if seat.rank == 0]
    if mode == "nccl" and senders:
        seat = senders[0]
        yield (
            f"weight_sync.mode=nccl between trainer-{seat.rank} and engine-{seat.engine} on GPU {seat.number}: NCCL takes a "
            "GPU into a process group once, and refuses or hangs; give the engine a GPU of its own (engine.devices=null), or "
            f"use weight_sync.mode={'lora' if recipe.model.lora else 'single_copy, or restart'}"
        )
    elif mode == "single_copy" and is_server(recipe) and any(_server_of(seat, recipe) != seat.engine for seat in where):
        yield (
            "weight_sync.mode=single_copy with a rank and its server on different GPUs: one copy of the weights is on one GPU; "
            "give trainer.devices and engine.devices the same numbers, or use weight_sync.mode=nccl"
        )
    elif shared and recipe.engine.kind == "hf_server":
        yield "engine.kind=hf_server on a GPU of the trainer: its weights come by nccl, which can't share one; use vllm_server"


def _parallel_refusals(recipe: Recipe, facts: ModelFacts) -> Iterator[str]:
    parts = tensor_parallel(recipe)
    if recipe.engine.tensor_parallel_size > 1 and recipe.engine.kind != "vllm_server":
        yield (
            f"engine.tensor_parallel_size={recipe.engine.tensor_parallel_size} with engine.kind={recipe.engine.kind}: only "
            "servers of vLLM share a model between GPUs; use engine.kind=vllm_server"
        )
    cut = recipe.trainer.tensor_ranks
    for name, count in (
        ("attention heads", facts.heads),
        ("heads of keys", facts.kv_heads),
        ("feed-forward width", facts.intermediate),
    ):
        if count % cut:
            yield f"trainer.tensor_ranks={cut} does not divide the {name} of {facts.name}, {count}; use one that does"
    if parts > 1 and facts.heads % parts:
        valid = [size for size in range(1, facts.heads + 1) if facts.heads % size == 0 and size <= 64]
        near = sorted(sorted(valid, key=lambda size: abs(size - parts))[:2])
        yield (
            f"engine.tensor_parallel_size={parts} does not divide the {facts.heads} attention heads of {facts.name}; use "
            f"{' or '.join(map(str, near))}"
        )


def _server_of(seat: Seat, recipe: Recipe) -> int | None:
    """The server whose worker a rank shares its weights with, where they are one copy."""
    return None if seat.rank is None else seat.rank // tensor_parallel(recipe)


def _ranks(recipe: Recipe) -> dict[int, int]:
    """Rank by GPU."""
    trainer, engine = recipe.trainer, recipe.engine
    numbers = trainer.devices
    if numbers is None and trainer.device.startswith("cuda:"):
        numbers = (int(trainer.device.removeprefix("cuda:")),)
    if numbers is None or len(numbers) != trainer.num_ranks:
        taken = set(engine.devices or ()) if is_server(recipe) else _own_device(recipe)
        free = (number for number in range(trainer.num_ranks + len(taken)) if number not in taken)
        numbers = tuple(free)[: trainer.num_ranks]
    return {number: rank for rank, number in enumerate(numbers)}


def _engines(recipe: Recipe, total: int | None) -> dict[int, int]:
    """Engine by GPU."""
    ranks, parts = list(_ranks(recipe)), tensor_parallel(recipe)
    if not is_server(recipe):
        return dict.fromkeys(_own_device(recipe) or ranks[:1], 0)
    count = num_engines(recipe) * parts
    devices = recipe.engine.devices
    if devices is not None and len(devices) == count:
        numbers = list(devices)
    else:
        free = [number for number in range(total or 0) if number not in ranks]
        if len(free) < count:
            free = [number for number in range(len(ranks) + count + max(ranks)) if number not in ranks][:count]
        numbers = free[len(free) - count :]
    return {number: place // parts for place, number in enumerate(numbers)}


def _own_device(recipe: Recipe) -> set[int]:
    """The GPU that `engine.device` names."""
    device = recipe.engine.device if recipe.engine.kind == "vllm" else None
    number = "" if device is None else device.removeprefix("cuda").removeprefix(":")
    return {int(number)} if number.isdigit() else set()


def _span(name: str, numbers: list[int]) -> str:
    """`engine-0`, `engine-0 to engine-3`, `engine-0, engine-2`."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"{name}-{first}"
    if last - first + 1 == len(numbers):
        return f"{name}-{first} to {name}-{last}"
    shown = ", ".join(f"{name}-{number}" for number in numbers[:_MOST_NAMED])
    return shown if len(numbers) <= _MOST_NAMED else f"{shown} and {len(numbers) - _MOST_NAMED} more"
