"""Packing lays every sample into exactly one row, within the budget, and marks where each begins."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.errors import SampleError
from polyturn.trajectories.pack import pack
from unit.trajectories.making import sample

ARRAYS = ("input_ids", "loss_mask", "advantages", "engine_logprobs", "turn_index", "policy_version")


@st.composite
def samples(draw):
    """Up to 12 samples of up to 5 trajectories; no two are alike."""
    lengths = draw(st.lists(st.integers(2, 9), max_size=12))
    names = draw(st.lists(st.integers(0, 4), min_size=len(lengths), max_size=len(lengths)))
    return [
        sample(length, name=f"talk/{name % 2}/{name}", temperature=1.0 + name / 4, start=20 * index)
        for index, (length, name) in enumerate(zip(lengths, names, strict=True))
    ]


def pieces(batch):
    """The samples of a batch again, with the trajectory and temperature that the batch gives each."""
    found = []
    for row in batch.rows:
        for start, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
            (number,) = set(row.trajectory_index[start:end].tolist())
            (temperature,) = set(row.temperature[start:end].tolist())
            arrays = tuple(getattr(row, name)[start:end].tobytes() for name in ARRAYS)
            found.append((batch.trajectory_ids[number], temperature, *arrays))
    return found


def described(given_samples):
    return [(s.trajectory_id, s.temperature, *(getattr(s, name).tobytes() for name in ARRAYS)) for s in given_samples]


@given(samples(), st.integers(9, 30))
def test_every_sample_once_and_whole(given_samples, budget):
    batch = pack(given_samples, row_tokens=budget, planned_trajectories=17)
    assert Counter(pieces(batch)) == Counter(described(given_samples))
    assert batch.planned_trajectories == 17
    assert batch.num_tokens == sum(map(len, given_samples))
    assert batch.num_trained_tokens == sum(int(s.loss_mask.sum()) for s in given_samples)
    assert set(batch.trajectory_ids) == {s.trajectory_id for s in given_samples}
    assert len(set(batch.trajectory_ids)) == len(batch.trajectory_ids)


@given(samples(), st.integers(9, 30))
def test_rows_keep_the_budget_and_positions_restart(given_samples, budget):
    batch = pack(given_samples, row_tokens=budget, planned_trajectories=1)
    for row in batch.rows:
        assert 0 < len(row.input_ids) <= budget
        assert row.cu_seqlens[0] == 0
        assert row.cu_seqlens[-1] == len(row.input_ids)
        lengths = np.diff(row.cu_seqlens)
        assert (lengths > 0).all()
        assert row.position_ids.tolist() == [place for length in lengths for place in range(length)]
        # Nothing predicts the first token of a sample, least of all the last one of the sample before.
        assert not row.loss_mask[row.cu_seqlens[:-1]].any()
        assert {len(getattr(row, name)) for name in (*ARRAYS, "position_ids", "temperature", "trajectory_index")} == {
            len(row.input_ids)
        }


@given(samples(), st.integers(9, 30), st.randoms(use_true_random=False))
def test_order_changes_rows_but_not_what_is_in_them(given_samples, budget, rng):
    shuffled = rng.sample(given_samples, len(given_samples))
    one, other = (pack(chosen, row_tokens=budget, planned_trajectories=1) for chosen in (given_samples, shuffled))
    assert Counter(pieces(one)) == Counter(pieces(other))
    # First fit by length depends on lengths only, so the rows are as many and as long.
    assert sorted(len(row.input_ids) for row in one.rows) == sorted(len(row.input_ids) for row in other.rows)


@given(samples(), st.integers(9, 30))
def test_equal_input_gives_equal_rows(given_samples, budget):
    one, other = (pack(list(given_samples), row_tokens=budget, planned_trajectories=1) for _ in range(2))
    assert pieces(one) == pieces(other)
    assert [row.cu_seqlens.tolist() for row in one.rows] == [row.cu_seqlens.tolist() for row in other.rows]


@given(samples(), st.integers(9, 30))
def test_no_two_rows_would_fit_one(given_samples, budget):
    """What first fit promises: a later row was opened because its first sample fitted nowhere."""
    rows = pack(given_samples, row_tokens=budget, planned_trajectories=1).rows
    for index, row in enumerate(rows):
        first = int(row.cu_seqlens[1])
        assert all(len(earlier.input_ids) + first > budget for earlier in rows[:index])


def test_a_trajectory_cut_into_samples_is_one_and_ties_keep_their_order():
    given_samples = [sample(3, name="talk/0/0"), sample(3, name="talk/0/1", start=20), sample(3, name="talk/0/0", start=40)]
    batch = pack(given_samples, row_tokens=6, planned_trajectories=2)
    assert batch.trajectory_ids == ("talk/0/0", "talk/0/1")
    assert [row.input_ids.tolist() for row in batch.rows] == [[0, 1, 2, 20, 21, 22], [40, 41, 42]]
    assert [row.trajectory_index.tolist() for row in batch.rows] == [[0, 0, 0, 1, 1, 1], [0, 0, 0]]


def test_the_longest_come_first():
    batch = pack([sample(2), sample(5, start=20), sample(3, start=40)], row_tokens=5, planned_trajectories=1)
    assert [row.cu_seqlens.tolist() for row in batch.rows] == [[0, 5], [0, 3, 5]]


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(SampleError, match=r"talk/0/0: 6 tokens do not fit a row of 5; raise trainer\.row_tokens"):
        pack([sample(2, name="talk/0/1"), sample(6)], row_tokens=5, planned_trajectories=1)


def test_nothing_to_pack():
    batch = pack([], row_tokens=5, planned_trajectories=8)
    assert batch.rows == ()
    assert batch.num_tokens == batch.num_trained_tokens == 0
