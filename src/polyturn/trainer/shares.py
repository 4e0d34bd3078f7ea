"""Cuts the batch of an optimizer step into one share a rank, and carries shares as bytes.

A token's weight in the loss is fixed over the whole step before it is cut, so the sum of the ranks' gradients is the gradient
of the uncut batch, whatever the cut. Shares travel as JSON and numpy's own format; nothing is unpickled.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from polyturn.losses.aggregation import token_weights
from polyturn.losses.base import required
from polyturn.losses.policy import needs_whole_segments
from polyturn.trainer.settings import TrainerSettings
from polyturn.types import Floats, PackedRow, TrainBatch

_ROW_FIELDS = tuple(field.name for field in fields(PackedRow))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """One rank's rows of one optimizer step; there may be none."""

    rows: tuple[PackedRow, ...]
    token_weights: tuple[Floats, ...]
    """Weight of every trained token, `[N]` a row, as the whole step fixes it."""
    whole_segments: bool
    """Whether some turn or trajectory lies in several rows, maybe of other ranks, where the loss needs it whole."""


def share_out(
    batches: Sequence[TrainBatch], num_shares: int, settings: TrainerSettings, *, on_policy: bool, equally_many: bool = False
) -> list[list[Share]]:
    """As many shares of each batch: rows go to the one with the fewest tokens so far, the longest first. A rank trains one, or
    ranks that cut rows among them do so together.

    With `equally_many` every share gets as many rows, those of equal place of similar length; where they don't go round, a row
    of two tokens without any under the loss fills the place.

    >>> [[len(share.rows) for share in rank] for rank in share_out([], 2, settings, on_policy=True)]
    [[], []]
    """
    return [
        list(column)
        for column in zip(*(_cut(batch, num_shares, settings, on_policy, equally_many) for batch in batches), strict=True)
    ] or [[] for _ in range(num_shares)]


def to_bytes(shares: Sequence[Share]) -> bytes:
    """The shares of one rank, to be read by `from_bytes`."""
    arrays = {
        f"{index}/{row}/{name}": getattr(packed, name)
        for index, share in enumerate(shares)
        for row, packed in enumerate(share.rows)
        for name in _ROW_FIELDS
    } | {
        f"{index}/{row}/weights": weights
        for index, share in enumerate(shares)
        for row, weights in enumerate(share.token_weights)
    }
    head = [{"rows": len(share.rows), "whole_segments": share.whole_segments} for share in shares]
    buffer = io.BytesIO()
    np.savez(buffer, head=np.frombuffer(json.dumps(head).encode(), dtype=np.uint8), **arrays)
    return buffer.getvalue()


def from_bytes(data: bytes) -> list[Share]:
    """The shares that `to_bytes` wrote. Raises ValueError for anything else."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return [
                Share(
                    rows=tuple(
                        PackedRow(**{name: arrays[f"{index}/{row}/{name}"] for name in _ROW_FIELDS})
                        for row in range(head["rows"])
                    ),
                    token_weights=tuple(arrays[f"{index}/{row}/weights"] for row in range(head["rows"])),
                    whole_segments=bool(head["whole_segments"]),
                )
                for index, head in enumerate(json.loads(arrays["head"].tobytes()))
            ]
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"not the shares of a rank: {type(error).__name__}: {error}") from error


def _cut(batch: TrainBatch, num_ranks: int, settings: TrainerSettings, on_policy: bool, equally_many: bool) -> list[Share]:
    weights = token_weights(
        required(settings.loss.aggregation, "aggregation"),
        np.concatenate([row.trajectory_index[row.loss_mask] for row in batch.rows]),
        planned_trajectories=batch.planned_trajectories,
        fixed_length=required(settings.loss.fixed_length, "fixed_length"),
    ).astype(np.float32)
    ends = np.cumsum([row.loss_mask.sum() for row in batch.rows])[:-1]
    weights_of = np.split(weights, ends)
    # Rows that are cut over ranks have segments on several of them.
    cut = settings.context_ranks > 1 or _some_segment_is_cut(batch)
    whole = cut and needs_whole_segments(settings.loss, on_policy=on_policy)
    lengths = [len(row.input_ids) for row in batch.rows]
    dealt = _in_rounds(lengths, num_ranks) if equally_many else _balanced(lengths, num_ranks)
    most = max(map(len, dealt)) if equally_many else 0
    return [
        Share(
            rows=(*(batch.rows[index] for index in indices), *([_EMPTY_ROW] * (most - len(indices)))),
            token_weights=(*(weights_of[index] for index in indices), *([_NO_WEIGHTS] * (most - len(indices)))),
            whole_segments=whole,
        )
        for indices in dealt
    ]


def _some_segment_is_cut(batch: TrainBatch) -> bool:
    """Whether the trained tokens of some trajectory lie in several rows."""
    trajectories = [np.unique(row.trajectory_index[row.loss_mask]) for row in batch.rows]
    return len(np.unique(np.concatenate(trajectories))) < sum(map(len, trajectories))


def _balanced(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of `costs` for each rank, in their own order; equal inputs give equal cuts."""
    totals, chosen = [0] * num_ranks, [[] for _ in range(num_ranks)]  # type: tuple[list[int], list[list[int]]]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = totals.index(min(totals))
        totals[rank] += costs[index]
        chosen[rank].append(index)
    return [sorted(indices) for indices in chosen]


def _in_rounds(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of `costs` for each rank, dealt round by round, the longest first: ranks that wait for each other at every row
    get rows of similar length in each round, and in turn the longest of one.
    """
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    rounds = [order[start : start + num_ranks] for start in range(0, len(order), num_ranks)]
    return [
        [dealt[place] for number, dealt in enumerate(rounds) if (place := (rank + number) % num_ranks) < len(dealt)]
        for rank in range(num_ranks)
    ]


def _empty_row() -> PackedRow:
    zeros = np.zeros(2, dtype=np.int64)
    floats = np.zeros(2, dtype=np.float32)
    return PackedRow(
        input_ids=zeros,
        position_ids=np.arange(2, dtype=np.int64),
        cu_seqlens=np.array([0, 2], dtype=np.int64),
        loss_mask=np.zeros(2, dtype=np.bool_),
        advantages=floats,
        engine_logprobs=floats,
        temperature=floats + 1,
        trajectory_index=zeros,
        turn_index=zeros - 1,
        policy_version=zeros - 1,
    )


_EMPTY_ROW = _empty_row()
_NO_WEIGHTS = np.zeros(0, dtype=np.float32)
