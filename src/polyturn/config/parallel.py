"""How the ranks of the trainer share the weights, and what can't be had together with shards."""

from __future__ import annotations

from collections.abc import Iterator

from polyturn.config.schema import Recipe, with_values
from polyturn.errors import ConfigError


def parallel(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str]) -> Recipe:
    """`trainer.parallel` follows from the number of ranks. Raises ConfigError for what does not go together, a line each."""
    trainer = recipe.trainer
    ranks, chosen = trainer.num_ranks, trainer.parallel
    if chosen == "auto":
        chosen = "single" if ranks == 1 else "ddp"
        reasons["trainer.parallel"] = "one rank" if ranks == 1 else f"{ranks} ranks, each with the whole weights"
    if chosen == "single" and ranks > 1:
        raise ConfigError(f"trainer.parallel=single with trainer.num_ranks={ranks}: use ddp or fsdp2, or trainer.num_ranks=1")
    if chosen != "single" and ranks == 1:
        raise ConfigError(
            f"trainer.parallel={chosen} with trainer.num_ranks=1: there is nobody to share with; use single, or more ranks"
        )
    cut = chosen in ("fsdp2", "deepspeed")
    problems = list(_shard_refusals(recipe, chosen) if cut else _whole_refusals(recipe, chosen))
    if chosen == "deepspeed":
        problems += _deepspeed_refusals(recipe)
    if problems:
        raise ConfigError("\n".join(problems))
    return with_values(recipe, "trainer", parallel=chosen)


def _whole_refusals(recipe: Recipe, chosen: str) -> Iterator[str]:
    """Settings of shards where there are none."""
    for key, default in (("shard_ranks", None), ("sync_every_row", False)):
        value = getattr(recipe.trainer, key)
        if value != default:
            yield f"trainer.{key}={str(value).lower()} with trainer.parallel={chosen}: there are no shards; use fsdp2"


def _deepspeed_refusals(recipe: Recipe) -> Iterator[str]:
    """What FSDP2 can do and DeepSpeed can't."""
    trainer, shards = recipe.trainer, "trainer.parallel=deepspeed with"
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
        yield f"{shards} weight_sync.mode=restart: the weights are not whole in one process; use weight_sync.mode=nccl"
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
        fits = [part for part in range(2, trainer.num_ranks + 1) if trainer.num_ranks % part == 0]
        yield (
            f"trainer.shard_ranks={size} does not divide trainer.num_ranks={trainer.num_ranks}: every copy of the weights is "
            f"cut over as many ranks; use {' or '.join(map(str, fits))}"
        )
