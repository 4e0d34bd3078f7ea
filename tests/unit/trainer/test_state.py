"""A trainer's state: every kind of optimizer goes on from it as if nothing had happened."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
import torch

from parts.models import same_bits, snapshot, tiny_model
from parts.samples import on_policy, packed, random_samples, trainer_settings
from parts.thread_ranks import on_ranks
from polyturn.checkpoint.files import read_rest, read_state, write_files
from polyturn.checkpoint.tree import split
from polyturn.errors import TrainingError
from polyturn.trainer.random_state import random_state, restore_random_state
from polyturn.trainer.trainer import Trainer

KINDS = {
    "in place": ("float32", {}),
    "sgd": ("float32", {"optimizer": "sgd"}),
    "masters": ("bfloat16", {"master_weights": "float32"}),
    "offloaded": ("bfloat16", {"master_weights": "float32", "offload_optimizer": True}),
    "stochastic": ("bfloat16", {"master_weights": "stochastic"}),
    "8bit": ("float32", {"optimizer": "adamw_8bit"}),
}
HAS_BNB = importlib.util.find_spec("bitsandbytes") is not None


def make_model(kind: str, *, tied: bool = False, seed: int = 0) -> torch.nn.Module:
    return tiny_model(seed=seed, tie_word_embeddings=tied).to(getattr(torch, KINDS[kind][0]))


def make_trainer(kind: str, *, tied: bool = False, ranks=None, seed: int = 0, model=None) -> Trainer:
    _, given = KINDS[kind]
    model = model or make_model(kind, tied=tied, seed=seed)
    # A rate that changes from step to step: a schedule that starts anew would show.
    settings = trainer_settings(learning_rate=0.01, schedule="linear", warmup_steps=3, total_optimizer_steps=8, seed=3, **given)
    return Trainer(model, settings, ranks=ranks)


def batch_of(trainer: Trainer, seed: int):
    return [packed(on_policy(random_samples(seed, count=4), trainer.model))]


def through_files(folder, trainer: Trainer, other: Trainer) -> None:
    """What a checkpoint does."""
    folder.mkdir()
    tensors, rest = split({"modules": {"policy": trainer.state()}})
    write_files(folder, tensors, rest)
    into, _ = split({"modules": {"policy": other.state_to_fill()}})
    other.go_on_from(read_state(folder, read_rest(folder)["modules"]["policy"], into))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_trainer_goes_on_to_the_bit(tmp_path, kind, tied):
    if kind == "8bit" and not HAS_BNB:
        pytest.skip("bitsandbytes is not installed")
    whole = make_trainer(kind, tied=tied)
    whole.train(batch_of(whole, 1))
    whole.train(batch_of(whole, 2))
    other = make_trainer(kind, tied=tied, seed=9)
    through_files(tmp_path / "saved", whole, other)
    assert same_bits(snapshot(whole.model), snapshot(other.model))
    assert (other.version, other.optimizer_step) == (2, 2)
    for seed in (3, 4):
        batch = batch_of(whole, seed)
        one, two = whole.train(batch), other.train(batch)
        assert (one["loss"], one["learning_rate"]) == (two["loss"], two["learning_rate"])
    assert same_bits(snapshot(whole.model), snapshot(other.model))


def test_filling_moves_no_weight():
    for kind in ("in place", "masters", "sgd"):
        trainer = make_trainer(kind)
        before = snapshot(trainer.model)
        trainer.state_to_fill()
        assert same_bits(before, snapshot(trainer.model)), kind
        assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_weights_alone_bring_their_float32_copies():
    trainer = make_trainer("masters")
    trainer.train(batch_of(trainer, 1))
    state = trainer.state("model")
    assert state["optimizer"].keys() == {"masters"}
    assert len(state["optimizer"]["masters"]) == len(state["trained"])
    assert make_trainer("in place").state("model").keys() == {"model", "trained", "version"}


def test_counters_start_anew_for_a_new_run():
    whole, other = make_trainer("in place"), make_trainer("in place")
    whole.train(batch_of(whole, 1))
    other.state_to_fill()
    other.go_on_from(whole.state(), counters=False)
    assert (other.version, other.optimizer_step) == (0, 0)
    assert other.optimizer.state_dict()["rule"]["state"][0]["exp_avg"].abs().sum() > 0


def test_two_ranks_save_once_and_go_on_together(tmp_path):
    def copy(state, randomness):
        assert len(randomness) == 2
        assert randomness[1].keys() == {"python", "numpy", "torch", "cuda"}
        tensors, rest = split({"modules": {"policy": state}})
        write_files(tmp_path, tensors, rest)

    def work(models, resumed):
        def rank(ranks):
            trainer = make_trainer("in place", ranks=ranks, model=models[ranks.rank])
            if resumed:
                into, _ = split({"modules": {"policy": trainer.state_to_fill()}})
                trainer.go_on_from(read_state(tmp_path, read_rest(tmp_path)["modules"]["policy"], into))
            if ranks.rank:
                return trainer.serve()
            if not resumed:
                trainer.train(batch_of(trainer, 1))
                trainer.save(copy)
            trainer.train(batch_of(trainer, 2))
            return trainer.end()

        assert on_ranks(2, rank) == [None, None]
        return [snapshot(model) for model in models]

    whole = work([make_model("in place"), make_model("in place")], resumed=False)
    again = work([make_model("in place", seed=4), make_model("in place", seed=4)], resumed=True)
    assert same_bits(whole[0], whole[1])
    assert same_bits(whole[0], again[0])
    assert same_bits(whole[0], again[1])


def test_ranks_that_read_different_weights_are_refused():
    models = [make_model("in place"), make_model("in place")]

    def rank(ranks):
        trainer = make_trainer("in place", ranks=ranks, model=models[ranks.rank])
        state = trainer.state_to_fill()
        if ranks.rank:
            state["model"]["lm_head.weight"].data[0, 0] += 1
        trainer.go_on_from(state)

    for error in on_ranks(2, rank):
        assert isinstance(error, TrainingError)
        assert str(error).startswith("the weights of the checkpoint differs between rank 0")


def test_every_generator_goes_on():
    def draw():
        return random.random(), np.random.rand(), float(torch.rand(())), random.gauss(0, 1), float(np.random.randn())

    random.gauss(0, 1)  # leaves one half of a pair behind
    np.random.randn()
    state = random_state()
    wanted = draw()
    draw()
    restore_random_state(state)
    assert draw() == wanted
