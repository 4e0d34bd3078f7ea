"""Lays samples end to end in rows of a token budget, those of a group with their common beginning once where that pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyturn.errors import SampleError
from polyturn.trajectories.prefixes import Segment, Tree, alone, trees
from polyturn.trajectories.sharing import Sharing
from polyturn.types import PackedRow, TrainBatch, TrainSample


def pack(
    samples: Sequence[TrainSample], *, row_tokens: int, planned_trajectories: int, sharing: Sharing | None = None
) -> TrainBatch:
    """Pack `samples` first-fit, longest first, ties in the order given, so that equal input gives equal rows.

    Args:
        samples: rows of one optimizer step.
        row_tokens: most tokens of a packed row.
        planned_trajectories: see `TrainBatch`.
        sharing: when common beginnings are laid down once; None for never.

    Raises:
        SampleError: a sample longer than `row_tokens`.
    """
    for sample in samples:
        if len(sample) > row_tokens:
            raise SampleError(
                f"{sample.trajectory_id}: {len(sample)} tokens do not fit a row of {row_tokens}; raise trainer.row_tokens"
            )
    chosen = lay_out(samples, row_tokens=row_tokens)
    if sharing is not None:
        shared = lay_out(samples, row_tokens=row_tokens, sharing=sharing)
        if sharing.pays(chosen, shared):
            chosen = shared
    numbers: dict[str, int] = {}
    for sample in samples:
        numbers.setdefault(sample.trajectory_id, len(numbers))
    rows = tuple(_row(samples, units, numbers) for units in chosen)
    return TrainBatch(
        rows=rows,
        trajectory_ids=tuple(numbers),
        planned_trajectories=planned_trajectories,
        num_shared_tokens=sum(map(len, samples)) - sum(len(row.input_ids) for row in rows),
    )


def lay_out(samples: Sequence[TrainSample], *, row_tokens: int, sharing: Sharing | None = None) -> list[list[Tree]]:
    """What goes into each row: samples by themselves, or trees of them."""
    units, sizes = [alone(number, sample) for number, sample in enumerate(samples)], list(map(len, samples))
    if sharing is not None:
        units = trees(samples, most_tokens=row_tokens, room=sharing.room)
        sizes = list(map(sharing.room, units))
    return [[units[unit] for unit in row] for row in _bins(sizes, row_tokens)]


def _bins(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """What goes into each row, by number."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        place = next((b for b, left in enumerate(room) if left >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(row_tokens)
        bins[place].append(index)
        room[place] -= length
    return bins


def _row(samples: Sequence[TrainSample], units: Sequence[Tree], numbers: dict[str, int]) -> PackedRow:
    segments: list[Segment] = []
    parents: list[int] = []
    for unit in units:
        first = len(segments)
        segments.extend(unit.segments)
        parents.extend(segment.parent + first if segment.parent >= 0 else -1 for segment in unit.segments)
    parts = [_tokens(samples, segment, numbers) for segment in segments]
    lengths = [segment.end - segment.start for segment in segments]
    return PackedRow(
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64),
        parents=np.array(parents if max(parents) >= 0 else [], dtype=np.int64),
        **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
    )


def _tokens(samples: Sequence[TrainSample], segment: Segment, numbers: dict[str, int]) -> dict[str, Any]:
    """What a row has of a segment; a token that another sample trains is that one's."""
    found = _fields(samples[segment.sample], segment, numbers)
    for owner in segment.owners:
        own = _fields(samples[owner], segment, numbers)
        found = {name: np.where(own["loss_mask"], own[name], values) for name, values in found.items()}
    return found


def _fields(sample: TrainSample, segment: Segment, numbers: dict[str, int]) -> dict[str, Any]:
    part, length = slice(segment.start, segment.end), segment.end - segment.start
    return {
        "input_ids": sample.input_ids[part],
        "position_ids": np.arange(segment.start, segment.end, dtype=np.int64),
        "loss_mask": sample.loss_mask[part],
        "advantages": sample.advantages[part],
        "engine_logprobs": sample.engine_logprobs[part],
        "temperature": np.full(length, sample.temperature, dtype=np.float32),
        "trajectory_index": np.full(length, numbers[sample.trajectory_id], dtype=np.int64),
        "turn_index": sample.turn_index[part],
        "policy_version": sample.policy_version[part],
    }
