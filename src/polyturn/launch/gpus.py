"""Which role gets which GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The GPU of each trainer rank, and those of the engine servers, `engine.tensor_parallel_size` each, as
    `CUDA_VISIBLE_DEVICES` names them; empty: on the CPU.
    """

    trainer: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()


def num_own_servers(recipe: Recipe) -> int:
    """Engine servers that the run starts itself."""
    engine = recipe.engine
    return engine.num_servers if engine.kind == "hf_server" or (engine.kind == "vllm_server" and not engine.urls) else 0


def place(recipe: Recipe, gpus: Sequence[str]) -> Placement:
    """GPUs for the trainer's ranks and the engine servers: the first ones and the last ones, unless the recipe names them.

    A vLLM server may share a GPU of the trainer where both are named and weights come by files (`lora`, `restart`) or from a
    rank elsewhere (`nccl`: rank 0 sends), and must where they are one copy (`single_copy`).
    Raises ConfigError for GPUs that aren't there, are too few, or are given out twice.
    """
    trainer, engine = recipe.trainer, recipe.engine
    num_engines = num_own_servers(recipe) * engine.tensor_parallel_size
    _refuse_numbered_device(recipe)
    if trainer.device == "cpu" or (trainer.device == "auto" and not gpus):
        for key, devices in (("trainer.devices", trainer.devices), ("engine.devices", engine.devices)):
            if devices:
                why = "trainer.device=cpu" if trainer.device == "cpu" else "no GPU is visible"
                raise ConfigError(f"{key}={list(devices)} but {why}; remove one of the two")
        return Placement()
    if not gpus:
        raise ConfigError(f"trainer.device={trainer.device} but no GPU is visible; use auto or cpu")
    _refuse_wrong_numbers("trainer", trainer.devices, trainer.num_ranks, "trainer.num_ranks", gpus)
    servers = "engine.num_servers" + (" x engine.tensor_parallel_size" if engine.tensor_parallel_size > 1 else "")
    _refuse_wrong_numbers("engine", engine.devices, num_engines, servers, gpus)
    shared = set(trainer.devices or ()) & set(engine.devices or ()) if num_engines else set[int]()
    if trainer.num_ranks + num_engines - len(shared) > len(gpus):
        needs = f"trainer.num_ranks={trainer.num_ranks}"
        needs += f" and {servers}={num_engines} need" if num_engines else " needs"
        raise ConfigError(
            f"{needs} {trainer.num_ranks + num_engines} GPUs, one each, and {len(gpus)} are visible; ask for fewer, or set "
            "trainer.device=cpu"
        )
    free = range(len(gpus))
    taken = set(engine.devices or ()) if num_engines else set[int]()
    first = trainer.devices or tuple(number for number in free if number not in taken)[: trainer.num_ranks]
    left = tuple(number for number in free if number not in first)
    last = (engine.devices or left[len(left) - num_engines :]) if num_engines else ()
    both = sorted(set(first) & set(last))
    if engine.kind == "vllm_server" and recipe.weight_sync.mode == "single_copy" and tuple(first) != tuple(last):
        raise ConfigError(
            f"trainer.devices={list(first)} and engine.devices={list(last)}: weight_sync.mode=single_copy is one copy of the "
            f"weights for rank and server of one GPU; set both to {list(first)}, or use weight_sync.mode=nccl"
        )
    if engine.kind == "vllm_server" and recipe.weight_sync.mode == "nccl" and first[0] in both:
        raise ConfigError(
            f"trainer.devices={list(first)} and engine.devices={list(last)} share GPU {first[0]}, from which rank 0 sends, and "
            f"NCCL can't connect two processes on one GPU (weight_sync.mode={recipe.weight_sync.mode}); use "
            "weight_sync.mode=single_copy, lora or restart, or give each a GPU of its own"
        )
    if both and engine.kind != "vllm_server":
        raise ConfigError(
            f"trainer.devices={list(first)} and engine.devices={list(last)} share GPU {both[0]}; each needs one of its own"
        )
    return Placement(trainer=tuple(gpus[number] for number in first), engines=tuple(gpus[number] for number in last))


def _refuse_numbered_device(recipe: Recipe) -> None:
    """A rank sees its own GPU only, and that is cuda:0."""
    device = recipe.trainer.device
    if device.startswith("cuda:"):
        number = device.removeprefix("cuda:")
        raise ConfigError(
            f"trainer.device={device} names one GPU of a single process, and this run has several processes; set "
            f"trainer.device=cuda and trainer.devices=[{number}]"
        )


def _refuse_wrong_numbers(section: str, devices: Sequence[int] | None, count: int, count_key: str, gpus: Sequence[str]) -> None:
    if devices is None or count == 0:
        return
    shown = f"{section}.devices={list(devices)}"
    if len(set(devices)) < len(devices):
        raise ConfigError(f"{shown} names a GPU twice; name {count} different ones")
    if len(devices) != count:
        raise ConfigError(f"{shown} has {len(devices)} GPUs for {count_key}={count}; name one for each")
    wrong = [number for number in devices if not 0 <= number < len(gpus)]
    if wrong:
        raise ConfigError(f"{shown}: there is no GPU {wrong[0]}; {len(gpus)} are visible, counted from 0")
