"""Lays samples end to end in rows of a token budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyturn.errors import SampleError
from polyturn.types import PackedRow, TrainBatch, TrainSample


def pack(samples: Sequence[TrainSample], *, row_tokens: int, planned_trajectories: int) -> TrainBatch:
    """Pack `samples` first-fit, longest first, ties in the order given, so that equal input gives equal rows.

    Args:
        samples: rows of one optimizer step.
        row_tokens: most tokens of a packed row.
        planned_trajectories: see `TrainBatch`.

    Raises:
        SampleError: a sample longer than `row_tokens`.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: -len(samples[i])):
        length = len(samples[index])
        if length > row_tokens:
            raise SampleError(
                f"{samples[index].trajectory_id}: {length} tokens do not fit a row of {row_tokens}; raise trainer.row_tokens"
            )
        place = next((b for b, left in enumerate(room) if left >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(row_tokens)
        bins[place].append(index)
        room[place] -= length
    numbers: dict[str, int] = {}
    for sample in samples:
        numbers.setdefault(sample.trajectory_id, len(numbers))
    rows = tuple(_row([samples[index] for index in members], numbers) for members in bins)
    return TrainBatch(rows=rows, trajectory_ids=tuple(numbers), planned_trajectories=planned_trajectories)


def _row(samples: Sequence[TrainSample], numbers: dict[str, int]) -> PackedRow:
    lengths = [len(sample) for sample in samples]
    return PackedRow(
        input_ids=np.concatenate([sample.input_ids for sample in samples]),
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        advantages=np.concatenate([sample.advantages for sample in samples]),
        engine_logprobs=np.concatenate([sample.engine_logprobs for sample in samples]),
        temperature=np.concatenate([np.full(len(sample), sample.temperature, dtype=np.float32) for sample in samples]),
        trajectory_index=np.concatenate(
            [np.full(len(sample), numbers[sample.trajectory_id], dtype=np.int64) for sample in samples]
        ),
        turn_index=np.concatenate([sample.turn_index for sample in samples]),
        policy_version=np.concatenate([sample.policy_version for sample in samples]),
    )
