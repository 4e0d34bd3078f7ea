"""The bytes that a plan is told are the bytes that are held."""

from __future__ import annotations

import itertools

import pytest
import torch

from parts.models import tiny_model
from parts.samples import packed, random_samples, trainer_settings
from polyturn.config.memory import Held, Placed, trained_tensor
from polyturn.trainer.trainer import Trainer

COMBINATIONS = [
    pytest.param(dtype, masters, optimizer, offload, marks=[pytest.mark.real] if optimizer == "adamw_8bit" else [])
    for dtype, masters, optimizer, offload in itertools.product(
        ("float32", "bfloat16"), ("none", "stochastic", "float32"), ("adamw", "adamw_8bit", "sgd"), (False, True)
    )
    if (dtype == "bfloat16" or masters == "none") and not (offload and optimizer == "adamw_8bit")
    if not (offload and dtype == "bfloat16" and masters != "float32")
]


@pytest.mark.parametrize(("dtype", "masters", "optimizer", "offload"), COMBINATIONS)
def test_what_is_planned_is_what_is_held(dtype, masters, optimizer, offload):
    model = tiny_model(hidden_size=64, intermediate_size=96).to(getattr(torch, dtype))
    settings = trainer_settings(optimizer=optimizer, master_weights=masters, offload_optimizer=offload)
    trainer = Trainer(model, settings)
    trainer.train([packed(random_samples())])
    trainer.forward_backward(packed(random_samples()))
    planned = Placed(device=Held())
    for parameter in model.parameters():
        planned += trained_tensor(parameter.numel(), dtype=dtype, optimizer=optimizer, master_weights=masters, offload=offload)
    if offload:
        trainer.optimizer.gradients()  # the last ones are still on their way
    assert trainer.optimizer.held() == planned
    trainer.optim_step()
    left = trainer.optimizer.held()
    staging = planned.device.weights if offload else 0
    assert (left.device.gradients, left.cpu.gradients) == (0, staging), "between two steps no gradient is held"
