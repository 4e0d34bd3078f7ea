"""Whose tokens are whose in a row that is cut over ranks, and what each sees; the ranks themselves are in test_shards.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.test_shared_prefixes import ALWAYS, everything
from parts.models import tiny_model
from parts.samples import make_sample, packed, random_samples
from parts.slow_varlen import telling_varlen
from polyturn.trainer import attention
from polyturn.trainer.context import Context, filled_up, own_part, own_tokens
from polyturn.trainer.context_attention import CONTEXT_MASKED, attend_across, by_samples, masked
from polyturn.trainer.row import RowTensors, to_tensors
from polyturn.trajectories.pack import pack
from polyturn.types import PackedRow

CPU = torch.device("cpu")


def row_of(lengths: list[int], seed: int = 0) -> PackedRow:
    rng = np.random.default_rng(seed)
    samples = [
        make_sample(number, [(length - length // 2, length // 2, float(number))], rng=rng)
        for number, length in enumerate(lengths)
    ]
    return packed(samples, row_tokens=1000).rows[0]


def tree_row() -> PackedRow:
    return pack(everything(), row_tokens=400, planned_trajectories=12, sharing=ALWAYS).rows[0]


def parts_of(row: PackedRow, size: int) -> list[RowTensors]:
    return [own_part(row, CPU, Context(None, size, number)) for number in range(size)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_every_token_and_every_trained_one_is_some_rank_s(lengths: list[int], size: int):
    row = row_of(lengths)
    whole, parts = to_tensors(row, CPU), parts_of(row, size)
    assert len({len(part.input_ids_T) for part in parts}) == 1, "collectives take equal shapes"
    places = torch.cat([part.part.own_t for part in parts])
    assert sorted(places.tolist()) == list(range(len(filled_up(row, 2 * size).input_ids)))
    assert sorted(torch.cat([part.own_N for part in parts]).tolist()) == list(range(len(whole.targets_N)))
    for part in parts:
        for name in ("targets_N", "advantages_N", "temperature_N", "engine_logprobs_N", "trajectory_index_N", "turn_index_N"):
            assert torch.equal(getattr(part, name), part.of(getattr(whole, name)))
        assert torch.equal(part.part.own_t[part.predicting_N], part.of(whole.predicting_N))
        inside = part.part.own_t < len(row.input_ids)
        assert torch.equal(part.input_ids_T[inside], whole.input_ids_T[part.part.own_t[inside]])
        assert torch.equal(part.position_ids_T[inside], whole.position_ids_T[part.part.own_t[inside]])


def test_work_is_even_where_a_row_is_one_sample():
    pairs = [sum(place + 1 for place in own_tokens(64, Context(None, 4, number)).tolist()) for number in range(4)]
    assert len(set(pairs)) == 1


def test_a_row_is_filled_up_with_a_sample_that_trains_nothing():
    for row in (row_of([5, 6]), tree_row()):
        filled = filled_up(row, 8)
        assert len(filled.input_ids) % 8 == 0
        assert filled.loss_mask.sum() == row.loss_mask.sum()
        added = len(filled.input_ids) - len(row.input_ids)
        assert filled.position_ids[len(row.input_ids) :].tolist() == list(range(added))
        assert filled.cu_seqlens[-1] == len(filled.input_ids)
        assert len(filled.parents) in (0, len(filled.cu_seqlens) - 1)
    assert filled_up(row_of([8]), 8).cu_seqlens.tolist() == [0, 8]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 4])
def test_a_rank_sees_what_the_whole_row_s_mask_says(size: int, window: int | None):
    row = filled_up(row_of([7, 2, 9, 4]), 2 * size)
    segment = np.repeat(np.arange(len(row.cu_seqlens) - 1), np.diff(row.cu_seqlens))
    back = np.arange(len(segment))[:, None] - np.arange(len(segment))
    sees = (segment[:, None] == segment) & (back >= 0) & (back < (window or 1000))
    for part in parts_of(row, size):
        assert torch.equal(part.part.mask(window)[0, 0], torch.from_numpy(sees)[part.part.own_t])


def states_of(part: Any) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    shapes = ((1, 4, len(part.own_t), 8), (1, 2, len(part.segment_T), 8), (1, 2, len(part.segment_T), 8))
    return module, [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 4])
def test_chunks_by_samples_are_what_the_mask_says(monkeypatch, size: int, window: int | None):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", telling_varlen)
    monkeypatch.setattr(attention, "_ASKS_FOR_GROUPS", True)
    rows = [row_of([7, 2, 9, 4]), row_of([40]), *packed(random_samples(count=8), row_tokens=200).rows]
    for row in rows:
        for part in (one.part for one in parts_of(row, size)):
            module, states = states_of(part)
            wanted, found = (attend(module, *states, part, 0.3, window) for attend in (masked, by_samples))
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_the_segments_of_a_rank_see_is_what_the_mask_says(monkeypatch, size: int):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", telling_varlen)
    monkeypatch.setattr(attention, "_ASKS_FOR_GROUPS", True)
    for part in (one.part for one in parts_of(tree_row(), size)):
        module, states = states_of(part)
        wanted, found = (attend(module, *states, part, 0.3, None) for attend in (masked, by_samples))
        torch.testing.assert_close(found, wanted)


def test_what_generates_attends_plainly():
    model = tiny_model()
    attend_across(model)
    assert model.config._attn_implementation == CONTEXT_MASKED
    ids = torch.arange(9)[None]
    torch.testing.assert_close(
        model(input_ids=ids, use_cache=False).logits, tiny_model()(input_ids=ids, use_cache=False).logits
    )
    attention.use_plain_attention(model)
    assert model.config._attn_implementation == "sdpa"
