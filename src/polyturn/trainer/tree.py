"""Segments of a row that follow others: who sees whom, as a mask, and as keys laid out anew for kernels that know no trees.

    row        p p p p  a a  b b b          queries   p p p p | a a         | b b b
    parents    -        0    0              keys      p p p p | p p p p a a | p p p p b b b

A kernel for separate samples computes the second form: queries of a piece are the last of its keys. Only keys and values are
there several times, for the length of the attention; all else of a layer, which is most of it, computes a token once.

Shapes: T tokens of a row, S its segments (and one more where they are bounds), U keys laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from polyturn.trainer.device import to_device
from polyturn.types import PackedRow

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Seen:
    """The keys that pieces of neighbouring queries see; the pieces lie in the order of the queries."""

    index_U: Tensor
    """Places in the row: the segments above a piece's own, then its own up to the last query."""
    cu_queries: Tensor
    """Where pieces begin among the queries, and the number of queries, int32."""
    cu_keys: Tensor
    """The same among the keys."""
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tree:
    """`segment_T` is each token's segment, `sees_SS[a, b]` whether tokens of segment a see those of segment b."""

    segment_T: Tensor
    sees_SS: Tensor
    position_T: Tensor
    seen: Seen

    def mask(self, own_t: Tensor | None = None) -> Tensor:
        """`[1, 1, T, T]`, true where a token (the first T, or those at `own_t`) sees another."""
        segment_t, position_t = self.segment_T, self.position_T
        if own_t is not None:
            segment_t, position_t = segment_t[own_t], position_t[own_t]
        earlier_tT = position_t[:, None] >= self.position_T[None]
        return (self.sees_SS[segment_t][:, self.segment_T] & earlier_tT)[None, None]


def tree_tensors(row: PackedRow, device: torch.device, chunks: Sequence[tuple[int, int]] | None = None) -> Tree | None:
    """Who sees whom in `row`; None where each segment is a sample. `chunks` are the queries, first and end of each, or all."""
    if not len(row.parents):
        return None
    segments = np.repeat(np.arange(len(row.parents)), np.diff(row.cu_seqlens))
    sees = np.eye(len(row.parents), dtype=np.bool_)
    for segment, parent in enumerate(row.parents):
        if parent >= 0:
            sees[segment] |= sees[parent]
    asking = [(0, len(segments))] if chunks is None else chunks
    return Tree(
        segment_T=to_device(segments, device),
        sees_SS=to_device(sees, device),
        position_T=to_device(row.position_ids, device),
        seen=_seen(row.cu_seqlens, row.parents, asking, device),
    )


def _seen(starts: Ints, parents: Ints, chunks: Sequence[tuple[int, int]], device: torch.device) -> Seen:
    place_T = np.arange(starts[-1])
    through = {-1: place_T[:0]}
    """Places of a segment that others follow, behind those of the segments above it."""
    for segment in np.unique(parents[parents >= 0]).tolist():
        through[segment] = np.concatenate([through[int(parents[segment])], place_T[starts[segment] : starts[segment + 1]]])
    bounds = [np.array([first, *starts[(starts > first) & (starts < end)], end]) for first, end in chunks]
    begins, stops = (np.concatenate([bound[part] for bound in bounds]) for part in (slice(None, -1), slice(1, None)))
    pieces = np.searchsorted(starts, begins, side="right") - 1
    places = [
        part
        for parent, start, stop in zip(parents[pieces].tolist(), starts[pieces].tolist(), stops.tolist(), strict=True)
        for part in (through[parent], place_T[start:stop])
    ]
    queries = stops - begins
    keys = stops - starts[pieces] + np.array([len(through[parent]) for parent in parents[pieces].tolist()])
    return Seen(
        index_U=to_device(np.concatenate(places), device),
        cu_queries=to_device(np.append(0, queries.cumsum()).astype(np.int32), device),
        cu_keys=to_device(np.append(0, keys.cumsum()).astype(np.int32), device),
        longest_query=int(queries.max()),
        longest_key=int(keys.max()),
    )
