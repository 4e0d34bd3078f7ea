"""Schedules by hand, and what weight decay touches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from parts.models import snapshot, tiny_model
from parts.samples import make_sample, packed, trainer_settings
from polyturn.trainer.optimizer import build_optimizer, learning_rate_at
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
    build_optimizer(model, trainer_settings(optimizer=optimizer, learning_rate=0.1, weight_decay=0.5)).step()
    vectors = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.1 * 0.5))
        else:
            vectors += 1
            assert torch.equal(parameter.detach(), before[name]), name
    assert vectors > 6


def test_only_trainable_parameters_are_given_to_the_optimizer():
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    given = [p for group in build_optimizer(model, trainer_settings()).param_groups for p in group["params"]]
    assert {id(p) for p in given} == {id(p) for name, p in model.named_parameters() if "mlp" in name}


def test_the_optimizer_gets_its_settings():
    optimizer = build_optimizer(tiny_model(), trainer_settings(betas=(0.7, 0.8), adam_epsilon=1e-5))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.7, 0.8), 1e-5)}
    assert isinstance(build_optimizer(tiny_model(), trainer_settings(optimizer="sgd")), torch.optim.SGD)
