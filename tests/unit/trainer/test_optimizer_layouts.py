"""The state of whole copies goes on as that of shards, and back."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from parts.samples import trainer_settings
from polyturn.trainer.optimizer import build_optimizer
from polyturn.trainer.optimizer_layouts import in_layout_of, masters_of
from polyturn.trainer.shard_optimizer import ShardOptimizer

SETTINGS = trainer_settings(learning_rate=0.01, weight_decay=0.1)


def model_of(dtype: torch.dtype) -> torch.nn.Module:
    """Vectors between matrices, so that numbers and names come in other orders."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)).to(
        dtype
    )


def step(model: torch.nn.Module, optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        given = torch.randn(parameter.shape).bfloat16()
        (parameter * given.to(parameter.dtype)).sum().backward()
    optimizer.gradients()
    optimizer.step(0.01)
    optimizer.zero_grad()


def whole(kind: str):
    model = model_of(torch.bfloat16 if kind == "masters" else torch.float32)
    settings = replace(SETTINGS, master_weights="float32" if kind == "masters" else "none")
    return model, build_optimizer(model, settings)


def shards(kind: str):
    model = model_of(torch.bfloat16 if kind == "masters" else torch.float32).float()
    settings = replace(SETTINGS, master_weights="float32" if kind == "masters" else "none")
    return model, ShardOptimizer(model, settings, rank=0)


def dimensions(model: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.ndim for name, parameter in model.named_parameters()}


def exact(model, optimizer) -> list[torch.Tensor]:
    """What is trained, in float32."""
    found = masters_of(optimizer.state_dict(), list(dimensions(model)))
    return [*model.parameters()] if found is None else found


@pytest.mark.parametrize("kind", ["masters", "in place"])
@pytest.mark.parametrize(("one", "other"), [(whole, shards), (shards, whole)])
def test_it_goes_on_to_the_bit(kind, one, other):
    (model, optimizer), (next_model, following) = one(kind), other(kind)
    for seed in (1, 2):
        step(model, optimizer, seed)
    for parameter in next_model.parameters():
        parameter.data.normal_()
    step(next_model, following, 9)
    live = following.state_dict()
    saved = copy.deepcopy(optimizer.state_dict())
    found = in_layout_of(live, saved, dimensions(model), steps=2)
    assert found.keys() == live.keys()
    with torch.no_grad():
        for target, source in zip(next_model.parameters(), model.parameters(), strict=True):
            target.copy_(source)
    following.load_state_dict(found)
    for seed in (3, 4):
        step(model, optimizer, seed)
        step(next_model, following, seed)
    for mine, theirs in zip(exact(model, optimizer), exact(next_model, following), strict=True):
        assert torch.equal(mine, theirs)


def test_what_has_no_such_layout():
    _, with_masters = whole("masters")
    _, without = whole("in place")
    model, named = shards("in place")
    kept = dimensions(model)
    assert in_layout_of(named.state_dict(), with_masters.state_dict(), kept, steps=0) is None
    assert in_layout_of(with_masters.state_dict(), without.state_dict(), kept, steps=0) is None
    assert in_layout_of({"rules": [], "noise": None}, named.state_dict(), kept, steps=0) is None
    assert masters_of({}, list(kept)) is None
