"""How the ranks of the trainer share the weights, and what can't be had together with shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from polyturn.config.schema import Recipe, with_values
from polyturn.errors import ConfigError


def parallel(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str]) -> Recipe:
    """`trainer.parallel` follows from the number of ranks. Raises ConfigError for what does not go together, a line each."""
    trainer = recipe.trainer
    ranks, chosen = trainer.num_ranks, trainer.parallel
    if chosen == "auto":
        chosen, reasons["trainer.parallel"] = _fitting(recipe)
    for key, what in (("context_ranks", "a row"), ("tensor_ranks", "a layer")):
        size = getattr(trainer, key)
        if size > ranks:
            raise ConfigError(
                f"trainer.{key}={size} with trainer.num_ranks={ranks}: {what} can't be cut over more ranks than there are; use "
                f"trainer.num_ranks={size}, or a multiple of it"
            )
    if chosen == "single" and ranks > 1:
        raise ConfigError(f"trainer.parallel=single with trainer.num_ranks={ranks}: use ddp or fsdp2, or trainer.num_ranks=1")
    if chosen != "single" and ranks == 1:
        raise ConfigError(
            f"trainer.parallel={chosen} with trainer.num_ranks=1: there is nobody to share with; use single, or more ranks"
        )
    cut = chosen in ("fsdp2", "deepspeed")
    problems = [
        *(_shard_refusals(recipe, chosen) if cut else _whole_refusals(recipe, chosen)),
        *_context_refusals(recipe),
        *_tensor_refusals(recipe, chosen),
        *(_deepspeed_refusals(recipe) if chosen == "deepspeed" else ()),
        *(_zero1_refusals(recipe) if chosen == "zero1" else ()),
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return with_values(recipe, "trainer", parallel=chosen)


def _fitting(recipe: Recipe) -> tuple[Literal["single", "ddp", "fsdp2"], str]:
    """What `auto` comes to, and why."""
    trainer = recipe.trainer
    if trainer.num_ranks == 1:
        return "single", "one rank"
    if trainer.tensor_ranks == 1:
        return "ddp", f"{trainer.num_ranks} ranks, each with the whole weights"
    if recipe.weight_sync.mode == "single_copy":
        return "ddp", "layers that are cut as the engine cuts its own are one copy with those (weight_sync.mode=single_copy)"
    return "fsdp2", "layers that are cut over ranks are shards"


def _context_refusals(recipe: Recipe) -> Iterator[str]:
    trainer, attention = recipe.trainer, recipe.model.attention
    size = trainer.context_ranks
    if trainer.num_ranks % size:
        yield (
            f"trainer.context_ranks={size} does not divide trainer.num_ranks={trainer.num_ranks}: every row is cut over as "
            f"many ranks; use {_divisors(trainer.num_ranks)}"
        )
    if size > 1 and attention in ("eager", "flash_attention_2"):
        yield (
            f"trainer.context_ranks={size} with model.attention={attention}: it can't look at keys of other ranks; use auto, "
            "varlen or sdpa"
        )


def _tensor_refusals(recipe: Recipe, chosen: str) -> Iterator[str]:
    trainer = recipe.trainer
    size = trainer.tensor_ranks
    if size == 1:
        return
    if trainer.num_ranks % size:
        yield (
            f"trainer.tensor_ranks={size} does not divide trainer.num_ranks={trainer.num_ranks}: every layer is cut over as "
            f"many ranks; use {_divisors(trainer.num_ranks)}"
        )
    layers = f"trainer.tensor_ranks={size} with"
    if trainer.context_ranks > 1:
        yield f"{layers} trainer.context_ranks={trainer.context_ranks}: use one of the two, the second for long rows"
    if trainer.shard_ranks is not None:
        yield f"{layers} trainer.shard_ranks={trainer.shard_ranks}: there is one copy of cut layers; leave it out"
    if recipe.model.lora is not None:
        yield f"{layers} model.lora: adapters are not cut with their layers; use trainer.tensor_ranks=1"
    if chosen == "zero1":
        yield f"{layers} trainer.parallel=zero1: use ddp, which cuts layers too, or fsdp2, which cuts everything"
    if chosen != "ddp":
        return
    if recipe.engine.kind in ("hf", "vllm"):
        yield (
            f"{layers} engine.kind={recipe.engine.kind}: such an engine is in the driver's process, which has a part of each "
            "layer; use engine.kind=hf_server or vllm_server"
        )
    if recipe.weight_sync.mode == "restart":
        yield (
            f"{layers} weight_sync.mode=restart: the weights are not whole in one process; use single_copy, or {_nccl(recipe)}"
        )
    if trainer.optimizer == "adamw_8bit":
        yield f"{layers} trainer.optimizer=adamw_8bit: its averages share scales across what ranks have apart; use adamw"
    if recipe.model.quantize is not None:
        yield f"{layers} model.quantize={recipe.model.quantize}: packed weights can't be cut; use trainer.tensor_ranks=1"


def _divisors(ranks: int) -> str:
    """Numbers above 1 that divide `ranks`, to choose from."""
    return " or ".join(str(part) for part in range(2, ranks + 1) if ranks % part == 0)


def _whole_refusals(recipe: Recipe, chosen: str) -> Iterator[str]:
    """Settings of shards where there are none."""
    for key, default in (("shard_ranks", None), ("sync_every_row", False)):
        value = getattr(recipe.trainer, key)
        if value != default:
            yield f"trainer.{key}={str(value).lower()} with trainer.parallel={chosen}: there are no shards; use fsdp2"


def _zero1_refusals(recipe: Recipe) -> Iterator[str]:
    parts = "trainer.parallel=zero1 with"
    if recipe.trainer.optimizer == "adamw_8bit":
        yield f"{parts} trainer.optimizer=adamw_8bit: its averages share scales across rows that ranks have apart; use adamw"
    if recipe.trainer.offload_optimizer:
        yield f"{parts} trainer.offload_optimizer=true: use one of the two; parts on the GPUs are the faster one"


def _deepspeed_refusals(recipe: Recipe) -> Iterator[str]:
    """What FSDP2 can do and DeepSpeed can't."""
    trainer, shards = recipe.trainer, "trainer.parallel=deepspeed with"
    for key in ("context_ranks", "tensor_ranks"):
        if getattr(trainer, key) > 1:
            yield f"{shards} trainer.{key}={getattr(trainer, key)}: its ranks have rows and layers of their own; use fsdp2"
    for key, default in (("shard_ranks", None), ("sync_every_row", False)):
        value = getattr(trainer, key)
        if value != default:
            why = "it cuts over all ranks" if key == "shard_ranks" else "it always does"
            yield f"{shards} trainer.{key}={str(value).lower()}: {why}; remove it, or use trainer.parallel=fsdp2"
    if trainer.activations == "selective":
        yield (
            f"{shards} trainer.activations=selective: gathering weights again is not among what it recomputes; use full, or "
            "trainer.parallel=fsdp2"
        )
    if trainer.compile == "on":
        yield f"{shards} trainer.compile=on: its hooks can't be compiled; use auto or off, or trainer.parallel=fsdp2"
    if recipe.model.dtype == "bfloat16" and trainer.master_weights not in ("auto", "float32"):
        yield (
            f"{shards} trainer.master_weights={trainer.master_weights}: it keeps float32 copies of bfloat16 weights; use "
            "float32, or trainer.parallel=fsdp2"
        )


def _nccl(recipe: Recipe) -> str:
    """The mode, with what it takes where a server lies beside the rank that sends."""
    sender = (recipe.trainer.devices or (None,))[0]
    beside = sender is not None and sender in (recipe.engine.devices or ())
    where = f" and other engine.devices than {sender}, from which rank 0 sends" if beside else ""
    return f"weight_sync.mode=nccl{where}"


def _shard_refusals(recipe: Recipe, chosen: str) -> Iterator[str]:
    trainer, sync = recipe.trainer, recipe.weight_sync
    shards = f"trainer.parallel={chosen} with"
    if recipe.engine.kind in ("hf", "vllm"):
        yield (
            f"{shards} engine.kind={recipe.engine.kind}: such an engine has a whole copy of the policy in the driver's "
            "process, which is what shards are there to avoid; use engine.kind=hf_server or vllm_server, or "
            "trainer.parallel=ddp"
        )
    if sync.mode == "restart":
        yield f"{shards} weight_sync.mode=restart: the weights are not whole in one process; use {_nccl(recipe)}"
    if trainer.optimizer == "adamw_8bit":
        yield (
            f"{shards} trainer.optimizer=adamw_8bit: its averages share scales across blocks that shards would cut; use adamw, "
            "whose state is cut over the ranks too"
        )
    if trainer.offload_optimizer:
        yield f"{shards} trainer.offload_optimizer=true: use one of the two; shards are the faster one"
    if trainer.reference_device == "cpu":
        yield f"{shards} trainer.reference_device=cpu: the reference is cut too; set trainer.reference_device=same"
    if recipe.model.quantize is not None:
        yield f"{shards} model.quantize={recipe.model.quantize}: packed weights can't be cut; use trainer.parallel=ddp"
    size = trainer.shard_ranks
    if chosen == "fsdp2" and size is not None and trainer.num_ranks % size:
        yield (
            f"trainer.shard_ranks={size} does not divide trainer.num_ranks={trainer.num_ranks}: every copy of the weights is "
            f"cut over as many ranks; use {_divisors(trainer.num_ranks)}"
        )
