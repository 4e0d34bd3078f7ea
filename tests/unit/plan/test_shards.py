"""What a rank with shards holds, to the byte, and when `trainer.parallel=auto` comes to shards."""

from __future__ import annotations

import pytest

from polyturn.config.resolve import resolve
from polyturn.config.schema import EnvironmentSection, ModelSection, Recipe, RunSection, with_values
from polyturn.plan.auto_parallel import shard_on
from polyturn.plan.changes import plan_on
from polyturn.plan.hardware import load_hardware
from polyturn.plan.memory import TrainerLoad, held_bytes, peak, trainer_terms
from polyturn.plan.models import facts_from_config, model_facts
from polyturn.plan.planner import trainer_load

HARDWARE = load_hardware()
TINY = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({}, 111636),
        ({"dtype": "bfloat16", "master_weights": "float32"}, 111636),
        ({"dtype": "bfloat16", "master_weights": "stochastic"}, 93044),
    ],
)
def test_a_shard_is_held_to_the_byte(given, held):
    """The numbers are those that tests/unit/trainer/test_shards.py finds on two ranks."""
    load = TrainerLoad(**{"dtype": "float32", "row_tokens": 64, "trained_tokens": 32, "rows": 2, "shards": 2, **given})
    found = held_bytes(facts_from_config(TINY, name="tiny"), load).device
    assert found.total - found.gradients == held


@pytest.mark.parametrize(("ranks", "given"), [(2, {}), (4, {"shards": 2})])
def test_cut_layers_are_held_to_the_byte(ranks, given):
    """The first number is what tests/unit/trainer/test_shards.py finds on two ranks of cut layers, but for counts of steps."""
    load = TrainerLoad(dtype="float32", row_tokens=64, trained_tokens=32, rows=2, tensor_ranks=2, **given)
    found = held_bytes(facts_from_config(TINY, name="tiny"), load).device
    rest, layers = 2 * 48 * 32 + 5 * 32, 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert found.total - found.gradients == pytest.approx(12 * (rest * 2 + layers) / ranks + 4 * 21)


def test_ranks_that_compute_layers_together_divide_their_width():
    facts = model_facts("Qwen/Qwen2.5-7B")

    def terms(tensor: int) -> dict[str, float]:
        load = TrainerLoad(
            dtype="bfloat16",
            row_tokens=8192,
            trained_tokens=8192,
            rows=4,
            master_weights="float32",
            shards=4 // tensor,
            tensor_ranks=tensor,
        )
        return {term.name: term.bytes for term in trainer_terms(facts, load)}

    one, four = terms(1), terms(4)
    assert 0.25 * one["activations"] < four["activations"] < 0.5 * one["activations"]
    assert four["gathered weights"] < one["gathered weights"]
    ends = facts.embedding + facts.head
    assert four["whole gradients"] == pytest.approx(4 * (ends + (facts.parameters - ends) / 4), rel=1e-3)
    assert one["weights"] < four["weights"] < one["weights"] + 4 * ends


def test_ranks_divide_what_is_held_and_not_what_is_computed():
    facts = model_facts("Qwen/Qwen2.5-7B")

    def terms(**given):
        load = TrainerLoad(
            dtype="bfloat16",
            row_tokens=8192,
            trained_tokens=8192,
            rows=4,
            master_weights="float32",
            activations="full",
            **given,
        )
        return {term.name: term.bytes for term in trainer_terms(facts, load)}, peak(trainer_terms(facts, load))

    (one, _), (two, most), (eight, least) = terms(), terms(shards=2), terms(shards=8)
    assert one["activations"] == eight["activations"]
    assert two["weights"] + two["optimizer state"] == pytest.approx(12 * facts.parameters / 2, rel=1e-3)
    assert eight["weights"] == pytest.approx(4 * facts.parameters / 8, rel=1e-3)
    assert least < most
    assert two["whole gradients"] == 4 * facts.parameters
    every, leaner = terms(shards=8, sync_every_row=True)
    assert every["whole gradients"] < 0.2 * eight["whole gradients"]
    assert leaner < least


def test_ranks_that_share_rows_divide_what_is_computed():
    facts = model_facts("Qwen/Qwen2.5-7B")
    recipe = with_values(
        recipe_of("Qwen/Qwen2.5-7B", parallel="fsdp2", row_tokens=65536), "rollout", max_trajectory_tokens=65536
    )

    def terms(**given) -> dict[str, float]:
        resolved = resolve(with_values(recipe, "trainer", **given), num_train_tasks=None).recipe
        return {term.name: term.bytes for term in trainer_terms(facts, trainer_load(resolved))}

    for activations in ("keep", "full"):
        one, four = terms(activations=activations), terms(activations=activations, context_ranks=4)
        assert four["activations"] == pytest.approx(one["activations"] / 4)
        assert four["weights"] == one["weights"]
        layers = facts.layers if activations == "keep" else 1
        others = 65536 * 3 / 4 * 2 * facts.kv_heads * facts.head_dim
        assert four["keys and values of other ranks"] == pytest.approx(others * (2 * layers + 2 + 4))
        assert "keys and values of other ranks" not in one


@pytest.mark.parametrize(
    ("given", "each"), [({"dtype": "bfloat16", "master_weights": "float32"}, 14), ({"dtype": "float32"}, 16)]
)
def test_deepspeed_keeps_float32_copies_beside_the_weights(given, each):
    facts = model_facts("Qwen/Qwen2.5-7B")
    load = TrainerLoad(row_tokens=64, trained_tokens=32, rows=2, shards=4, copies_beside=True, **given)
    found = held_bytes(facts, load).device
    assert found.total - found.gradients == pytest.approx(each * facts.parameters / 4, rel=1e-3)
    assert found.gradients == pytest.approx(4 * facts.parameters / 4, rel=1e-3)


def recipe_of(model: str, **trainer) -> Recipe:
    recipe = Recipe(
        run=RunSection(steps=5), model=ModelSection(path=model, dtype="bfloat16"), environment=EnvironmentSection(id="lookup")
    )
    recipe = with_values(recipe, "engine", kind="vllm_server", num_servers=4)
    return with_values(recipe, "trainer", num_ranks=4, **trainer)


def test_auto_takes_shards_where_whole_copies_do_not_fit():
    machine = HARDWARE.gpus_alone("h100-80gb", 8)
    recipe = recipe_of("Qwen/Qwen2.5-7B", activations="full")
    facts = model_facts(recipe.model.path)
    chosen, reasons = shard_on(recipe, facts, machine, num_tasks=None)
    assert chosen.trainer.parallel == "fsdp2"
    assert "whole copies need" in reasons["trainer.parallel"]
    assert plan_on(chosen, facts, machine).problems(machine) == ()
    small = recipe_of("Qwen/Qwen2.5-0.5B")
    assert shard_on(small, model_facts(small.model.path), machine, num_tasks=None) == (small, {})
    given = recipe_of("Qwen/Qwen2.5-7B", activations="full", parallel="ddp")
    assert shard_on(given, facts, machine, num_tasks=None) == (given, {})
