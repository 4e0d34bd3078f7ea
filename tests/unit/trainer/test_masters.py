"""What keeps small updates of bfloat16 weights: by hand, by statistics, over many rows and on several ranks."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from parts.models import gradients, largest_gap, same_bits, snapshot, tiny_model
from parts.samples import loss_options, make_sample, on_policy, packed, random_samples, trainer_settings
from parts.thread_ranks import ThreadRanks, on_ranks
from polyturn.errors import NonFiniteError
from polyturn.trainer.in_place import InPlaceOptimizer
from polyturn.trainer.masters import MasterOptimizer
from polyturn.trainer.optimizer import build_optimizer
from polyturn.trainer.rounded import RoundedOptimizer
from polyturn.trainer.rounding import stochastic_bfloat16
from polyturn.trainer.trainer import Trainer

MODES = {
    "none": {},
    "float32": {"master_weights": "float32"},
    "stochastic": {"master_weights": "stochastic"},
    "offload": {"master_weights": "float32", "offload_optimizer": True},
}


def half_model(seed: int = 0, **given) -> torch.nn.Module:
    return tiny_model(seed=seed, **given).bfloat16()


# ── a step by hand ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", MODES)
def test_one_step_of_adamw_by_hand(mode):
    """From zeroed averages a step of AdamW is the rate, by the gradient's sign; bfloat16 holds 3.0 - 0.25 exactly."""
    parameter = torch.nn.Parameter(torch.tensor([[3.0, 3.0, -1.0]], dtype=torch.bfloat16))
    model = torch.nn.Module()
    model.weight = parameter
    optimizer = build_optimizer(model, trainer_settings(weight_decay=0.0, **MODES[mode]))
    (parameter.float() * torch.tensor([[2.0, -0.5, 0.0]])).sum().backward()
    assert [g.float().tolist() for g in optimizer.gradients()] == [[[2.0, -0.5, 0.0]]]
    optimizer.step(0.25)
    assert parameter.dtype == torch.bfloat16
    assert parameter.tolist() == [[2.75, 3.25, -1.0]]
    optimizer.zero_grad()
    assert [g.float().tolist() for g in optimizer.gradients()] == [[[0.0, 0.0, 0.0]]]


@pytest.mark.parametrize("mode", MODES)
def test_small_updates_are_lost_by_plain_bfloat16_alone(mode):
    """400 steps of 1e-6 are 4e-4. Around 0.25 bfloat16 numbers are 1e-3 or 2e-3 apart: no single step reaches the next one."""
    count, steps, rate = 4096, 400, 1e-6
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.full((count, 2), 0.25, dtype=torch.bfloat16))
    optimizer = build_optimizer(model, trainer_settings(betas=(0.0, 0.0), **MODES[mode]))
    for _ in range(steps):
        model.weight.float().sum().backward()
        optimizer.step(rate)
        optimizer.zero_grad()
    moved = float(0.25 - model.weight.detach().double().mean())
    if mode == "none":
        assert moved == 0
    elif mode == "stochastic":
        # Each weight goes down 2^-10 with chance rate x steps x 2^10, or about 0.41: the mean of 8192 has this spread.
        spread = 2**-10 * np.sqrt(0.41 * 0.59 / (2 * count))
        assert abs(moved - steps * rate) < 5 * spread
        assert len(set(model.weight.flatten().tolist())) > 1
    else:
        assert moved == pytest.approx(0, abs=1e-9), "not yet: 4e-4 is less than half a gap of 2^-10"
        (master,) = optimizer.state_dict()["masters"]
        assert float(0.25 - master.double().mean()) == pytest.approx(steps * rate, rel=5e-3)
        for _ in range(200):
            model.weight.float().sum().backward()
            optimizer.step(rate)
            optimizer.zero_grad()
        assert set(model.weight.flatten().tolist()) == {0.25 - 2**-10}, "6e-4 is more"


def test_stochastic_rounding_is_unbiased():
    generator = torch.Generator().manual_seed(0)
    for value, low, high in ((1.0 + 2**-9, 1.0, 1.0 + 2**-7), (-1.0 - 2**-8, -1.0 - 2**-7, -1.0), (1e-40, 0.0, 1.84e-40)):
        count = 200_000
        rounded = stochastic_bfloat16(torch.full((count,), value), generator).double()
        assert sorted(set(rounded.tolist())) == pytest.approx([low, high], rel=1e-2)
        spread = (high - low) * 0.5 / np.sqrt(count)
        assert abs(float(rounded.mean()) - float(torch.tensor(value).double())) < 5 * spread


def test_stochastic_rounding_leaves_what_bfloat16_holds():
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-120, 3.3895e38, float("inf"), float("-inf")]).bfloat16()
    for seed in range(20):
        rounded = stochastic_bfloat16(exact.float(), torch.Generator().manual_seed(seed))
        assert torch.equal(rounded.view(torch.int16), exact.view(torch.int16))


# ── many rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("mode", "total"), [("none", 1.0), ("float32", 2.0), ("stochastic", 1.0), ("offload", 2.0)])
def test_many_small_gradients_after_a_large_one(mode, total):
    """1 + 1000 x 0.001: in bfloat16, where 1 and 1.0078 are neighbours, each of the thousand is rounded away."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimizer = build_optimizer(model, trainer_settings(**MODES[mode]))
    for gradient in (1.0, *[0.001] * 1000):
        (model.weight * gradient).sum().backward()
    (found,) = optimizer.gradients()
    assert found.tolist() == [[pytest.approx(total, rel=2e-3)] * 2] * 2


def test_the_gradient_hardly_depends_on_how_many_rows_there_are():
    rng = np.random.default_rng(0)
    samples = [make_sample(number, [(3, 3, 1.0)], rng=rng) for number in range(64)]

    def gap(**given) -> float:
        found = []
        for tokens in (6, 1024):
            model = half_model()
            trainer = Trainer(model, trainer_settings(**given))
            trainer.forward_backward(packed(samples, row_tokens=tokens))
            names = [name for name, _ in model.named_parameters()]
            found.append(dict(zip(names, (g.float().clone() for g in trainer.optimizer.gradients()), strict=True)))
        return largest_gap(*found)

    plain, masters = gap(), gap(master_weights="float32")
    assert masters < 0.75 * plain, "what is left is the rounding of each row's own gradient"
    assert gap(**MODES["offload"]) == masters


def test_float32_weights_with_masters_are_plain_training_to_the_bit():
    """Masters of float32 weights, as an offload has them, change nothing at all."""
    plain, away = tiny_model(), tiny_model()
    batches = [packed(random_samples(), row_tokens=30)]
    first = Trainer(plain, trainer_settings(num_iterations=3)).train(batches)
    second = Trainer(away, trainer_settings(num_iterations=3, offload_optimizer=True)).train(batches)
    assert first == second
    assert same_bits(snapshot(plain), snapshot(away))


@pytest.mark.parametrize("mode", ["float32", "offload"])
def test_masters_follow_float32_training(mode):
    exact, half = half_model().float(), half_model()
    batches = [packed(random_samples(), row_tokens=30)]
    for model, given in ((exact, {}), (half, MODES[mode])):
        trainer = Trainer(model, trainer_settings(learning_rate=1e-3, **given))
        for _ in range(3):
            trainer.train(batches)
    masters = dict(zip(dict(half.named_parameters()), trainer.optimizer.state_dict()["masters"], strict=True))
    start = snapshot(half_model().float())
    moved = torch.cat([(tensor - start[name]).flatten() for name, tensor in exact.named_parameters()]).detach()
    also = torch.cat([(masters[name] - start[name]).flatten() for name, _ in exact.named_parameters()])
    assert float(torch.cosine_similarity(moved, also, dim=0)) > 0.9
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, masters[name].bfloat16()), "the model is its masters, rounded"


def test_nothing_is_left_in_the_parameters():
    """A second set of gradients would take half as much memory again."""
    model = half_model()
    seen = []
    model.model.embed_tokens.weight.register_hook(lambda _: seen.append(len(gradients(model))))
    trainer = Trainer(model, trainer_settings(master_weights="float32"))
    trainer.forward_backward(packed(random_samples(), row_tokens=30))
    assert gradients(model) == {}
    assert max(seen) == 0, "they go as they come: at the end of a backward pass none is left from its start"


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_no_number_leaves_everything_alone(mode):
    model = half_model()
    trainer, before = Trainer(model, trainer_settings(**MODES[mode])), snapshot(model)
    hook = model.model.norm.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NonFiniteError):
        trainer.train([packed(random_samples())])
    hook.remove()
    assert same_bits(snapshot(model), before)
    assert gradients(model) == {}
    other = half_model()
    healthy = trainer.train([packed(random_samples())])
    assert healthy == Trainer(other, trainer_settings(**MODES[mode])).train([packed(random_samples())])
    assert same_bits(snapshot(model), snapshot(other))


def test_a_later_optimizer_gets_the_gradients_of_its_model():
    """A warm start trains one model with several optimizers, one after the other."""
    model = half_model()
    optimizer = build_optimizer(model, trainer_settings(master_weights="float32"))
    del optimizer
    gc.collect()
    InPlaceOptimizer(list(model.parameters()), trainer_settings())
    model(input_ids=torch.arange(5)[None]).logits.sum().backward()
    assert len(gradients(model)) == len(list(model.parameters()))


# ── going on ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("mode", MODES)
def test_going_on_from_a_saved_state_is_exact(mode, optimizer):
    settings = trainer_settings(optimizer=optimizer, **MODES[mode])
    batches = [packed(random_samples(), row_tokens=30)]
    whole = half_model()
    trainer = Trainer(whole, settings)
    trainer.train(batches)
    weights = snapshot(whole)
    state = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, trainer.optimizer.state_dict())
    trainer.train(batches)

    resumed = half_model(seed=9)
    later = Trainer(resumed, settings, version=1)
    resumed.load_state_dict(weights)
    later.optimizer.load_state_dict(state)
    later.optimizer_step = 1
    later.train(batches)
    assert same_bits(snapshot(whole), snapshot(resumed))


# ── ranks ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", MODES)
def test_ranks_stay_equal_to_the_bit(mode):
    settings = trainer_settings(loss_options(), num_iterations=2, **MODES[mode])
    samples = on_policy(random_samples(), tiny_model(), gap=0.3)
    batches = [packed(samples, row_tokens=max(map(len, samples)))]
    models = [half_model(), half_model(), half_model()]

    def work(ranks: ThreadRanks) -> dict[str, torch.Tensor]:
        trainer = Trainer(models[ranks.rank], settings, ranks=ranks)
        if ranks.rank == 0:
            trainer.train(batches)
            trainer.end()
        else:
            trainer.serve()
        return snapshot(models[ranks.rank])

    zero, *others = on_ranks(3, work)
    assert not same_bits(zero, snapshot(half_model()))
    assert all(same_bits(zero, other) for other in others)


# ── where things lie ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_which_optimizer_is_which():
    def kind(model: torch.nn.Module, **given) -> type:
        return type(build_optimizer(model, trainer_settings(**given)))

    assert kind(tiny_model()) is InPlaceOptimizer
    assert kind(tiny_model(), offload_optimizer=True) is MasterOptimizer
    assert [kind(half_model(), **given) for given in MODES.values()] == [
        InPlaceOptimizer,
        MasterOptimizer,
        RoundedOptimizer,
        MasterOptimizer,
    ]


def test_stochastic_rounding_keeps_no_float32_weights_between_steps():
    model = half_model()
    trainer = Trainer(model, trainer_settings(master_weights="stochastic"))
    trainer.train([packed(random_samples())])
    held = trainer.optimizer.held().device
    assert held.master == 0
    assert held.weights == 2 * sum(p.numel() for p in model.parameters())


def test_a_row_on_its_way_is_forgotten_too():
    model = half_model()
    optimizer = build_optimizer(model, trainer_settings(**MODES["offload"]))
    model(input_ids=torch.arange(5)[None]).logits.sum().backward()
    optimizer.zero_grad()
    assert all(float(gradient.abs().max()) == 0 for gradient in optimizer.gradients())


def test_a_batch_with_a_new_advantage_trains_otherwise():
    """The comparisons above would hold for an optimizer that does nothing."""
    batch = packed(random_samples())
    flipped = replace(batch, rows=tuple(replace(row, advantages=-row.advantages) for row in batch.rows))
    models = [half_model(), half_model()]
    for model, given in zip(models, (batch, flipped), strict=True):
        Trainer(model, trainer_settings(master_weights="float32")).train([given])
    assert not same_bits(snapshot(models[0]), snapshot(models[1]))
