"""Shards that DeepSpeed keeps train as FSDP2's and as whole weights do, go on exactly, and name a rank that is gone."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
import torch

from parts.shard_cases import CASES
from polyturn.errors import MissingDependencyError, ModelError
from polyturn.trainer.zero3 import Gathered, load_deepspeed, refuse_apart_experts
from unit.trainer.test_shards import close, play

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"
)
REFUSED = ("selective recomputation", "summed after every row")
"""By the recipe's rules."""


@pytest.mark.real
@needs_deepspeed
def test_it_trains_as_fsdp2_and_as_whole_weights_do():
    only = tuple(name for name in CASES if name not in REFUSED)
    (found,) = play("zero3", 2, *only)
    assert found.keys() == {f"{name}, {other}" for name in only for other in ("whole", "fsdp2")}
    wrong = {name: gaps for name, gaps in found.items() if max(gaps.values()) > close(name)}
    assert not wrong


@pytest.mark.real
@needs_deepspeed
def test_a_gathered_state_goes_on_exactly():
    for found in play("zero3_resumed", 2, waited_for=(0, 1)):
        for name, mode in found.items():
            masters = ["master"] if name == "masters" else []
            assert mode.pop("kept") == ["exp_avg", "exp_avg_sq", *masters, "step"], found
            assert all(mode.values()), found


@pytest.mark.real
@needs_deepspeed
def test_a_rank_that_is_killed_in_a_backward_pass_is_named():
    (found,) = play("zero3_lose_a_rank", 2)
    assert "waited for a forward and backward pass (rank 0 of 2)" in found["lost"]
    assert re.search(r"; rank 1 \(.+, process \d+\) can't be heard any more, or took longer", found["lost"]), found


def test_without_the_package_the_sentence_has_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'polyturn\[deepspeed\]', or use trainer\.parallel=fsdp2"):
        load_deepspeed("cpu")


def test_experts_that_are_modules_of_their_own_are_refused():
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})})
    with pytest.raises(ModelError, match=r"mlp\.experts of this model is a list of experts"):
        refuse_apart_experts(model)
    refuse_apart_experts(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_a_gathered_tensor_has_a_whole_shape_and_no_numbers_of_its_own():
    tensor = Gathered.of((3, 2), torch.bfloat16, torch.device("cpu"), lambda: torch.ones(3, 2))
    assert (tensor.shape, tensor.dtype, tensor.numel()) == ((3, 2), torch.bfloat16, 6)
    assert torch.equal(tensor.full_tensor(), torch.ones(3, 2))
    with pytest.raises(NotImplementedError, match="gather it first"):
        tensor + 1
