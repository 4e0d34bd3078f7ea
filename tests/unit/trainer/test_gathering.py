"""Which part of a tensor each rank holds, against torch's own account. Many at once: test_shards.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from polyturn.trainer.gathering import blocks, whole_tensors


@given(
    rows=st.integers(0, 13), columns=st.integers(1, 7), sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)), data=st.data()
)
def test_the_blocks_are_a_tensor_each_number_once(rows, columns, sizes, data):
    placements = data.draw(
        st.sampled_from(
            [
                (Shard(0), Replicate()),
                (Replicate(), Shard(0)),
                (Shard(0), Shard(1)),
                (Shard(0), Shard(0)),
                (_StridedShard(0, split_factor=sizes[1]), Shard(0)),
            ]
        )
    )
    times = torch.zeros(rows, columns)
    found = list(blocks(times.shape, placements, sizes))
    for block in found:
        times[block] += 1
    assert bool((times == 1).all())
    cutting = [size for size, placement in zip(sizes, placements, strict=True) if not placement.is_replicate()]
    assert len(found) == torch.Size(cutting).numel()


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 9])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_axis_cuts_as_torch_chunks(rows, size):
    whole = torch.arange(rows * 2.0).view(rows, 2)
    parts = [*whole.chunk(size), *[whole[:0]] * size][:size]
    for block, part in zip(blocks(whole.shape, (Shard(0),), (size,)), parts, strict=True):
        torch.testing.assert_close(whole[block], part)


def test_an_axis_that_cut_later_cuts_the_parts_of_the_other():
    """Rows 0 to 5 over tensor ranks, 0-2 and 3-5, and the part of each over two shards: two rows and one."""
    whole = torch.arange(6)
    found = {}
    marked = (_StridedShard(0, split_factor=2), Shard(0))
    for place, block in zip(itertools.product(range(2), range(2)), blocks(whole.shape, marked, (2, 2)), strict=True):
        found[place] = whole[block].tolist()
    assert found == {(0, 0): [0, 1], (0, 1): [3, 4], (1, 0): [2], (1, 1): [5]}


def test_what_nobody_cut_is_returned_as_it_is():
    plain = {"a": torch.randn(3), "b": torch.zeros((), dtype=torch.int64)}
    found = whole_tensors(plain, torch.bfloat16)
    assert all(found[name] is tensor for name, tensor in plain.items())
