"""What ranks hold follows from their number, and what shards can't do is refused in a sentence."""

from __future__ import annotations

import pytest

from polyturn.config.resolve import resolve
from polyturn.config.schema import EnvironmentSection, LoraSection, ModelSection, Recipe, RunSection, with_values
from polyturn.errors import ConfigError

RECIPE = Recipe(run=RunSection(steps=5), model=ModelSection(path="builtin:tiny"), environment=EnvironmentSection(id="lookup"))
SERVED = with_values(RECIPE, "engine", kind="hf_server")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "single"),
        ({"num_ranks": 4}, "ddp"),
        ({"num_ranks": 4, "parallel": "fsdp2"}, "fsdp2"),
        ({"num_ranks": 2, "tensor_ranks": 2}, "fsdp2"),
        ({"num_ranks": 4, "tensor_ranks": 2, "parallel": "ddp"}, "ddp"),
        ({"num_ranks": 3, "parallel": "deepspeed"}, "deepspeed"),
        ({"num_ranks": 3, "parallel": "zero1"}, "zero1"),
    ],
)
def test_it_follows_from_the_number_of_ranks(given, found):
    resolved = resolve(with_values(SERVED, "trainer", **given), num_train_tasks=None)
    assert resolved.recipe.trainer.parallel == found
    assert resolve(resolved.recipe, num_train_tasks=None).recipe == resolved.recipe


def test_rows_are_cut_over_ranks_with_whole_weights_and_with_shards():
    for parallel in ("auto", "fsdp2"):
        recipe = with_values(SERVED, "trainer", num_ranks=4, context_ranks=2, parallel=parallel)
        assert resolve(recipe, num_train_tasks=None).recipe.trainer.context_ranks == 2


SHARDS = {"num_ranks": 4, "parallel": "fsdp2"}
LAYERS = {"num_ranks": 2, "parallel": "ddp", "tensor_ranks": 2}
STATE = {"num_ranks": 2, "parallel": "zero1"}
ZERO3 = {"num_ranks": 4, "parallel": "deepspeed"}
HALF = with_values(SERVED, "model", dtype="bfloat16")


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (with_values(RECIPE, "trainer", **SHARDS), "engine.kind=hf: such an engine has a whole copy"),
        (with_values(SERVED, "trainer", num_ranks=2, parallel="single"), "parallel=single with trainer.num_ranks=2"),
        (with_values(SERVED, "trainer", parallel="fsdp2"), "there is nobody to share with"),
        (with_values(SERVED, "trainer", **SHARDS, optimizer="adamw_8bit"), "adamw_8bit: its averages"),
        (with_values(SERVED, "trainer", **SHARDS, offload_optimizer=True), "use one of the two"),
        (with_values(SERVED, "trainer", **SHARDS, reference_device="cpu"), "the reference is cut too"),
        (with_values(SERVED, "trainer", **SHARDS, shard_ranks=3), "does not divide trainer.num_ranks=4.*use 2 or 4"),
        (with_values(RECIPE, "trainer", **ZERO3), "parallel=deepspeed with engine.kind=hf: such an engine has a whole copy"),
        (with_values(SERVED, "trainer", **ZERO3, offload_optimizer=True), "use one of the two"),
        (with_values(SERVED, "trainer", **ZERO3, shard_ranks=2), "shard_ranks=2: it cuts over all ranks"),
        (
            with_values(SERVED, "trainer", **ZERO3, context_ranks=2),
            "context_ranks=2: its ranks have rows and layers of their own",
        ),
        (
            with_values(SERVED, "trainer", **ZERO3, tensor_ranks=2),
            "tensor_ranks=2: its ranks have rows and layers of their own",
        ),
        (with_values(SERVED, "trainer", **ZERO3, sync_every_row=True), "sync_every_row=true: it always does"),
        (with_values(SERVED, "trainer", **ZERO3, activations="selective"), "activations=selective: gathering"),
        (with_values(SERVED, "trainer", **ZERO3, compile="on"), "compile=on: its hooks"),
        (with_values(HALF, "trainer", **ZERO3, master_weights="stochastic"), "it keeps float32 copies"),
        (with_values(SERVED, "trainer", parallel="deepspeed"), "there is nobody to share with"),
        (with_values(SERVED, "trainer", num_ranks=4, shard_ranks=2), "shard_ranks=2 with trainer.parallel=ddp"),
        (
            with_values(SERVED, "trainer", context_ranks=2),
            "context_ranks=2 with trainer.num_ranks=1: .*use trainer.num_ranks=2",
        ),
        (with_values(SERVED, "trainer", num_ranks=4, context_ranks=3), "context_ranks=3 does not divide.*use 2 or 4"),
        (
            with_values(with_values(SERVED, "trainer", **SHARDS, context_ranks=2), "model", attention="eager"),
            "context_ranks=2 with model.attention=eager: .*use auto, varlen or sdpa",
        ),
        (with_values(SERVED, "trainer", tensor_ranks=2), "tensor_ranks=2 with trainer.num_ranks=1: .*use trainer.num_ranks=2"),
        (with_values(SERVED, "trainer", **SHARDS, tensor_ranks=3), "tensor_ranks=3 does not divide.*use 2 or 4"),
        (with_values(SERVED, "trainer", **SHARDS, tensor_ranks=2, context_ranks=2), "use one of the two, the second"),
        (with_values(SERVED, "trainer", **SHARDS, tensor_ranks=2, shard_ranks=2), "leave it out"),
        (with_values(SERVED, "trainer", parallel="zero1"), "there is nobody to share with"),
        (with_values(SERVED, "trainer", **STATE, optimizer="adamw_8bit"), "zero1 with trainer.optimizer=adamw_8bit"),
        (with_values(SERVED, "trainer", **STATE, offload_optimizer=True), "zero1 with trainer.offload_optimizer=true"),
        (with_values(SERVED, "trainer", **STATE, tensor_ranks=2), "tensor_ranks=2 with trainer.parallel=zero1: use ddp"),
        (with_values(SERVED, "trainer", **STATE, shard_ranks=2), "shard_ranks=2 with trainer.parallel=zero1"),
        (with_values(RECIPE, "trainer", **LAYERS), "tensor_ranks=2 with engine.kind=hf: such an engine is in the driver's"),
        (with_values(SERVED, "trainer", **LAYERS, optimizer="adamw_8bit"), "tensor_ranks=2 with trainer.optimizer=adamw_8bit"),
        (with_values(SERVED, "trainer", **LAYERS, sync_every_row=True), "sync_every_row=true with trainer.parallel=ddp"),
        (
            with_values(with_values(SERVED, "trainer", num_ranks=2, tensor_ranks=2), "model", lora=LoraSection(rank=4)),
            "adapters are not cut",
        ),
        (with_values(SERVED, "trainer", num_ranks=4, sync_every_row=True), "sync_every_row=true with trainer.parallel=ddp"),
    ],
)
def test_what_does_not_go_together_is_refused(recipe, words):
    with pytest.raises(ConfigError, match=words):
        resolve(recipe, num_train_tasks=None)
