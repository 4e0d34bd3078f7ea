"""Schedules by hand, and what weight decay touches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from parts.models import snapshot, tiny_model
from parts.samples import make_sample, packed, trainer_settings
from polyturn.trainer.in_place import InPlaceOptimizer
from polyturn.trainer.optimizer import build_optimizer, clip, learning_rate_at
from polyturn.trainer.trainer import Trainer


def rates(count: int, **given) -> list[float]:
    settings = trainer_settings(**({"learning_rate": 1.0, "total_optimizer_steps": 10} | given))
    return [learning_rate_at(step, settings) for step in range(count)]


def test_constant_after_a_warm_up():
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert rates(30, warmup_steps=0) == [1.0] * 30


def test_linear():
    assert rates(12, schedule="linear") == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0])
    # 8 steps are left after the warm-up: 1, 7/8, 6/8 ...
    assert rates(5, schedule="linear", warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.875, 0.75])


def test_cosine():
    found = rates(11, schedule="cosine")
    assert found[0] == 1
    assert found[5] == pytest.approx(0.5)
    assert found[10] == pytest.approx(0)
    assert found[2] == pytest.approx(0.5 * (1 + math.cos(0.2 * math.pi)))
    assert found[2] == pytest.approx(0.9045085)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_floor_is_a_share_of_the_peak_and_is_never_left(schedule):
    found = rates(15, schedule=schedule, min_learning_rate_ratio=0.2, warmup_steps=1)
    assert found[:2] == [1.0, 1.0]
    assert found[10:] == pytest.approx([0.2] * 5)
    assert min(found) == pytest.approx(0.2)


def test_a_floor_at_half_way():
    assert rates(6, schedule="linear", min_learning_rate_ratio=0.2)[5] == pytest.approx(0.2 + 0.8 * 0.5)


def test_the_peak_scales_everything():
    assert rates(3, learning_rate=3e-4, warmup_steps=2) == pytest.approx([1.5e-4, 3e-4, 3e-4])


def test_the_trainer_steps_with_the_scheduled_rate():
    """SGD with a clipped gradient moves the weights by exactly rate x clip: the rates can be read off the weights."""
    settings = trainer_settings(
        optimizer="sgd", learning_rate=0.1, warmup_steps=2, schedule="linear", total_optimizer_steps=4, max_grad_norm=1e-3
    )
    model = tiny_model()
    trainer = Trainer(model, settings)
    batch = packed([make_sample(0, [(3, 4, 1.0)], rng=np.random.default_rng(0))])
    moved = []
    for step in range(4):
        before = snapshot(model)
        metrics = trainer.train([batch])
        after = snapshot(model)
        moved.append(math.sqrt(sum(float((after[name] - before[name]).double().pow(2).sum()) for name in before)))
        assert metrics["learning_rate"] == pytest.approx(learning_rate_at(step, settings))
        assert metrics["grad_norm"] > 1e-2, "reported before clipping"
    assert moved == pytest.approx([0.05e-3, 0.1e-3, 0.1e-3, 0.05e-3], rel=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weight_decay_leaves_vectors_alone(optimizer):
    """Without a gradient only decay moves a weight."""
    model = tiny_model("qwen2")  # has biases
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)  # a bias of 0 would stay 0 whatever happened
            parameter.grad = torch.zeros_like(parameter)
    before = snapshot(model)
    build_optimizer(model, trainer_settings(optimizer=optimizer, weight_decay=0.5)).step(0.1)
    vectors = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.1 * 0.5))
        else:
            vectors += 1
            assert torch.equal(parameter.detach(), before[name]), name
    assert vectors > 6


@pytest.mark.parametrize("given", [{}, {"master_weights": "float32"}, {"master_weights": "stochastic"}])
def test_only_trainable_parameters_are_changed(given):
    model = tiny_model().bfloat16() if given else tiny_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    before = snapshot(model)
    trainer = Trainer(model, trainer_settings(learning_rate=1.0, **given))
    trainer.train([packed([make_sample(0, [(3, 4, 1.0)], rng=np.random.default_rng(0))])])
    changed = {name for name, tensor in snapshot(model).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "mlp" in name}
    assert len(trainer.optimizer.gradients()) == len(changed)


def test_the_optimizer_gets_its_settings():
    """One step of AdamW from zeroed averages, by hand: the gradient's sign, but for epsilon."""
    parameter = torch.nn.Parameter(torch.tensor([[1.0, -2.0, 3.0]]))
    settings = trainer_settings(betas=(0.7, 0.8), adam_epsilon=0.5, weight_decay=0.1)
    optimizer = InPlaceOptimizer([parameter], settings)
    for gradient, wanted in (
        # m = 0.3 g, v = 0.2 g^2; over 1 - beta they are g and g^2.
        ([1.0, -1.0, 0.0], [1.0 - 0.01 - 0.1 / 1.5, -2.0 + 0.02 + 0.1 / 1.5, 3.0 - 0.03]),
    ):
        parameter.grad = torch.tensor([gradient])
        optimizer.step(0.1)
        torch.testing.assert_close(parameter.detach(), torch.tensor([wanted]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_by_hand(dtype):
    gradients = [torch.tensor([3.0], dtype=dtype), torch.tensor([[0.0, 4.0]], dtype=dtype)]
    norm = clip(gradients, 1.0)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(5.0)
    assert gradients[0].tolist() == pytest.approx([0.6], rel=5e-3)
    assert gradients[1].tolist()[0] == pytest.approx([0.0, 0.8], rel=5e-3)
    assert float(clip(gradients, 1.5)) == pytest.approx(1.0, rel=5e-3)
    assert gradients[0].tolist() == pytest.approx([0.6], rel=5e-3), "a short gradient stays as it is"


def test_the_norm_of_bfloat16_gradients_is_not_a_bfloat16_number():
    gradients = [torch.full((1000,), 0.1, dtype=torch.bfloat16) for _ in range(10)]
    exact = float(torch.cat(gradients).double().norm())
    assert float(clip(gradients, 1e9)) == pytest.approx(exact, rel=1e-6)
    assert float(torch.tensor(exact).bfloat16()) != pytest.approx(exact, rel=1e-4)


def test_clipping_is_torchs_own():
    model = tiny_model()
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    torch.testing.assert_close(clip(ours, 0.3), wanted)
    for own, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad)
