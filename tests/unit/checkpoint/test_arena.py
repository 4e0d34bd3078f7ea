"""Shared memory: what is copied, when it is new, and that another process sees it."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from polyturn.checkpoint.arena import Arena, lay_out, map_memory

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor(3.5, dtype=torch.bfloat16),
    "c": torch.empty(0, 4),
    "d": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).transpose(0, 2),
    "e": torch.tensor([True, False]),
}


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.close()


def test_all_of_it_is_there_for_whoever_has_the_descriptor(arena):
    slots = arena.stage(TENSORS)
    other = map_memory(os.dup(arena.descriptor), arena.size)
    for slot in slots:
        assert torch.equal(slot.view(other), TENSORS[slot.path])
        assert slot.view(other).dtype == TENSORS[slot.path].dtype


def test_a_tensor_of_its_own_has_the_same_bytes_and_no_others(arena):
    """Torch saves the storage of a tensor; of a view into the whole memory that would be all of it, so it would copy first."""
    slots = arena.stage(TENSORS)
    for slot in slots:
        alone = slot.alone(arena.memory)
        assert (alone.dtype, alone.shape) == (TENSORS[slot.path].dtype, TENSORS[slot.path].shape)
        assert torch.equal(alone, TENSORS[slot.path])
        assert alone.untyped_storage().nbytes() == alone.numel() * alone.element_size()
        assert not alone.numel() or alone.data_ptr() == slot.view(arena.memory).data_ptr()


def test_the_memory_is_used_again_and_grows(arena):
    arena.stage({"a": torch.ones(10)})
    first = os.fstat(arena.descriptor).st_ino
    other = map_memory(os.dup(arena.descriptor), arena.size)
    arena.stage({"a": torch.zeros(8)})
    assert os.fstat(arena.descriptor).st_ino == first
    arena.stage({"a": torch.ones(10_000)})
    assert os.fstat(arena.descriptor).st_ino != first
    assert float(other[:32].view(torch.float32).sum()) == 0, "whoever holds the old memory keeps it"


@pytest.mark.parametrize("advice", [23, -1], ids=["advice", "without"])
def test_the_pages_are_there_before_the_first_copy(arena, monkeypatch, advice):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr("polyturn.checkpoint.arena._POPULATE_WRITE", advice)
    size, source = 64 << 20, torch.ones(16 << 20)
    arena.reserve(size)
    assert not arena.memory.any()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arena.stage({"w": source})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < size // mmap.PAGESIZE // 10


def test_what_is_staged_is_a_copy(arena):
    weight = torch.ones(4)
    (slot,) = arena.stage({"w": weight})
    weight.zero_()
    assert slot.view(arena.memory).tolist() == [1, 1, 1, 1]


def test_places_do_not_overlap():
    slots, size = lay_out(TENSORS)
    ends = [slot.offset + TENSORS[slot.path].numel() * TENSORS[slot.path].element_size() for slot in slots]
    assert all(end <= later.offset for end, later in zip(ends, slots[1:], strict=False))
    assert ends[-1] <= size
    assert all(slot.offset % 64 == 0 for slot in slots)


def test_no_memory_is_an_error_of_the_system(arena):
    with pytest.raises(OSError, match="are needed and"):
        arena.reserve(1 << 50)
    assert arena.stage({"a": torch.ones(2)})[0].view(arena.memory).tolist() == [1, 1]


class Cudart:
    """CUDA's runtime, as far as pages are pinned: the same ones can't be pinned twice."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if address in self.pinned:
            return 712
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


@pytest.fixture
def cudart(monkeypatch):
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.mark.parametrize("ended", [Arena.close, lambda arena: None], ids=["closed", "dropped"])
def test_pages_are_unpinned_with_the_end_of_an_arena(cudart, ended):
    arena = Arena()
    arena.reserve(1000, pinned=True)
    assert arena.pinned
    assert len(cudart.pinned) == 1
    arena.reserve(100_000, pinned=True)
    assert len(cudart.pinned) == 1, "of the memory that was too small none is left"
    ended(arena)
    del arena
    assert not cudart.pinned


def test_pages_that_can_t_be_pinned_serve_all_the_same(cudart, monkeypatch):
    """CUDA keeps the error for whoever launches the next kernel, so one is launched at once."""
    kernels = []

    def raises(*_, device):
        kernels.append(device)
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    monkeypatch.setattr(cudart, "cudaHostRegister", lambda *_: 712)
    monkeypatch.setattr(torch, "zeros", raises)
    arena = Arena()
    arena.reserve(1000, pinned=True)
    assert not arena.pinned
    assert kernels == ["cuda"]
    (slot,) = arena.stage({"a": torch.ones(10)})
    assert torch.equal(slot.view(arena.memory), torch.ones(10))
    arena.close()
    assert not cudart.pinned
