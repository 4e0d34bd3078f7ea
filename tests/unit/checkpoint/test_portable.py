"""One checkpoint, any number of ranks: each fills its shards, whole copies and torch's own loader get the same."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyturn.checkpoint.files import read_rest, read_state, write_files
from polyturn.checkpoint.tree import split

STATE = {
    "modules": {
        "policy": {
            "model": {"w": torch.randn(13, 5), "narrow": torch.randn(3, 2).bfloat16()},
            "optimizer": {"state": {0: {"exp_avg": torch.randn(13, 5), "step": torch.tensor(4.0)}}},
        }
    }
}


@pytest.fixture
def saved(tmp_path):
    tensors, rest = split(STATE)
    write_files(tmp_path, tensors, rest)
    return tmp_path, tensors


@contextlib.contextmanager
def a_rank(rank: int, size: int):
    """One of several ranks, whose collectives do nothing: loading must not need them."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(rank: int, *sizes: int) -> DeviceMesh:
    """Torch remembers what it has done with a mesh by its look, so that of another rank has other names."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"{axis} of rank {rank}" for axis in range(len(sizes))))


def sharded(tensor: torch.Tensor, mesh, placements) -> DTensor:
    """An empty tensor of that shape, of which this rank holds its part."""
    shard = placements[-1]
    rank, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    chunks = tensor.chunk(size, dim=0) if isinstance(shard, Shard) and tensor.dim() else (tensor,) * size
    local = torch.empty_like(chunks[rank]) if rank < len(chunks) else tensor.new_empty((0, *tensor.shape[1:]))
    placed = placements if tensor.dim() else [Replicate()] * mesh.ndim
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=tensor.shape, stride=tensor.stride())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_rank_of_any_number_gets_its_shards(saved, size):
    folder, tensors = saved
    parts: dict[str, list[torch.Tensor]] = {path: [] for path in tensors}
    for rank in range(size):
        with a_rank(rank, size):
            mesh = mesh_of(rank, size)
            into = {path: sharded(tensor, mesh, [Shard(0)]) for path, tensor in tensors.items()}
            back, _ = split(read_state(folder, read_rest(folder), into))
            for path, tensor in back.items():
                parts[path].append(tensor.to_local())
    for path, tensor in tensors.items():
        whole = torch.cat(parts[path]) if tensor.dim() else parts[path][0]
        assert torch.equal(whole, tensor)


def test_copies_that_are_cut_over_two_ranks_each(saved):
    folder, tensors = saved
    for rank in range(4):
        with a_rank(rank, 4):
            mesh = mesh_of(rank, 2, 2)
            into = {path: sharded(tensor, mesh, [Replicate(), Shard(0)]) for path, tensor in tensors.items()}
            read_state(folder, read_rest(folder), into)
            half = tensors["modules.policy.model.w"].chunk(2)[rank % 2]
            assert torch.equal(into["modules.policy.model.w"].to_local(), half)


def test_torchs_own_loader_reads_it(saved):
    folder, tensors = saved
    into = {path: torch.empty_like(tensor) for path, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(into, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(into[path], tensor) for path, tensor in tensors.items())
