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
    batches: Sequence[TrainBatch], num_ranks: int, settings: TrainerSettings, *, on_policy: bool
) -> list[list[Share]]:
    """Shares of every rank, one a batch: rows go to the rank with the fewest tokens so far, the longest first.

    >>> [[len(share.rows) for share in rank] for rank in share_out([], 2, settings, on_policy=True)]
    [[], []]
    """
    return [
        list(column) for column in zip(*(_cut(batch, num_ranks, settings, on_policy) for batch in batches), strict=True)
    ] or [[] for _ in range(num_ranks)]


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


def _cut(batch: TrainBatch, num_ranks: int, settings: TrainerSettings, on_policy: bool) -> list[Share]:
    weights = token_weights(
        required(settings.loss.aggregation, "aggregation"),
        np.concatenate([row.trajectory_index[row.loss_mask] for row in batch.rows]),
        planned_trajectories=batch.planned_trajectories,
        fixed_length=required(settings.loss.fixed_length, "fixed_length"),
    ).astype(np.float32)
    ends = np.cumsum([row.loss_mask.sum() for row in batch.rows])[:-1]
    weights_of = np.split(weights, ends)
    whole = _some_segment_is_cut(batch) and needs_whole_segments(settings.loss, on_policy=on_policy)
    return [
        Share(
            rows=tuple(batch.rows[index] for index in indices),
            token_weights=tuple(weights_of[index] for index in indices),
            whole_segments=whole,
        )
        for indices in _balanced([len(row.input_ids) for row in batch.rows], num_ranks)
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
