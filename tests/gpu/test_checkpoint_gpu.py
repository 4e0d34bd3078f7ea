"""Checkpoints of what lies on a GPU: copied through pinned memory, and gone on from to the bit."""

from __future__ import annotations

import pytest
import torch

from parts.models import same_bits, snapshot, tiny_model
from parts.samples import on_policy, packed, random_samples, trainer_settings
from polyturn.checkpoint.arena import Arena
from polyturn.checkpoint.files import read_rest, read_state, write_files
from polyturn.checkpoint.tree import split
from polyturn.trainer.random_state import random_state, restore_random_state
from polyturn.trainer.trainer import Trainer

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def make_trainer(**given) -> Trainer:
    settings = trainer_settings(master_weights="float32", **given)
    return Trainer(tiny_model(seed=0).to(DEVICE, torch.bfloat16), settings)


def test_the_copy_is_pinned_and_right_while_the_device_goes_on():
    tensors = {str(n): torch.randn(1 << 20, device=DEVICE) for n in range(8)}
    wanted = {name: tensor.cpu() for name, tensor in tensors.items()}
    arena = Arena()
    try:
        for _ in range(2):
            busy = torch.randn(2048, 2048, device=DEVICE)
            for _ in range(50):
                busy = torch.tanh(busy @ busy)
            slots = arena.stage(tensors)
            assert all(torch.equal(slot.view(arena.memory), wanted[slot.path]) for slot in slots)
        assert arena.pinned
    finally:
        arena.close()


def test_one_that_nobody_closed_is_unpinned_with_its_end():
    """Its addresses may be the next one's, and CUDA refuses to pin those twice."""
    for _ in range(3):
        arena = Arena()
        arena.stage({"a": torch.ones(1 << 20, device=DEVICE)})
        assert arena.pinned
        del arena


def test_memory_that_can_t_be_pinned_serves_and_leaves_no_error_behind(monkeypatch):
    first, second = Arena(), Arena()
    try:
        first.stage({"a": torch.ones(1 << 20, device=DEVICE)})
        monkeypatch.setattr("polyturn.checkpoint.arena.map_memory", lambda *_, **__: first.memory)
        (slot,) = second.stage({"a": torch.full((1 << 20,), 2.0, device=DEVICE)})
        assert not second.pinned
        assert float(torch.ones(3, device=DEVICE).sum()) == 3.0, "CUDA's error would come out of whatever is next"
        assert torch.equal(slot.view(second.memory), torch.full((1 << 20,), 2.0))
    finally:
        second.close()
        first.close()


@pytest.mark.parametrize("offload", [False, True])
def test_a_trainer_goes_on_to_the_bit(tmp_path, offload):
    whole, other = (make_trainer(offload_optimizer=offload) for _ in range(2))
    batches = [[packed(on_policy(random_samples(seed, count=4), tiny_model(seed=0)))] for seed in (1, 2)]
    whole.train(batches[0])
    tensors, rest = split({"modules": {"policy": whole.state()}})
    arena = Arena()
    slots = arena.stage(tensors)
    write_files(tmp_path, {slot.path: slot.view(arena.memory) for slot in slots}, rest)
    into, _ = split({"modules": {"policy": other.state_to_fill()}})
    other.go_on_from(read_state(tmp_path, read_rest(tmp_path)["modules"]["policy"], into))
    assert same_bits(snapshot(whole.model), snapshot(other.model))
    assert whole.train(batches[1])["loss"] == other.train(batches[1])["loss"]
    assert same_bits(snapshot(whole.model), snapshot(other.model))


def test_generators_of_the_device_go_on():
    state = random_state()
    wanted = torch.rand(4, device=DEVICE)
    restore_random_state(state)
    assert torch.equal(torch.rand(4, device=DEVICE), wanted)
