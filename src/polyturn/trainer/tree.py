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
from functools import cached_property
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


class Tree:
    """Who sees whom in `row`, whose segments follow others. `chunks` are the queries, first and end of each, or all.

    A mask or keys are made when they are asked for: attention wants one of them.
    """

    def __init__(self, row: PackedRow, device: torch.device, chunks: Sequence[tuple[int, int]] | None = None) -> None:
        self._row, self._device = row, device
        self._chunks = [(0, len(row.input_ids))] if chunks is None else chunks

    @cached_property
    def seen(self) -> Seen:
        """The keys of the queries."""
        return _seen(self._row.cu_seqlens, self._row.parents, self._chunks, self._device)

    def mask(self) -> Tensor:
        """`[1, 1, t, T]`, true where a query sees a token of the row."""
        segment_T, sees_SS, position_T, own_t = self._parts
        earlier_tT = position_T[own_t][:, None] >= position_T[None]
        return (sees_SS[segment_T[own_t]][:, segment_T] & earlier_tT)[None, None]

    @cached_property
    def _parts(self) -> tuple[Tensor, ...]:
        """Each token's segment, whether tokens of one segment see those of another, positions, and the queries."""
        row, parents = self._row, self._row.parents
        sees = np.eye(len(parents), dtype=np.bool_)
        for segment, parent in enumerate(parents):
            if parent >= 0:
                sees[segment] |= sees[parent]
        segments = np.repeat(np.arange(len(parents)), np.diff(row.cu_seqlens))
        own = np.concatenate([np.arange(first, end) for first, end in self._chunks])
        return tuple(to_device(values, self._device) for values in (segments, sees, row.position_ids, own))


def tree_of_row(row: PackedRow, device: torch.device, chunks: Sequence[tuple[int, int]] | None = None) -> Tree | None:
    """The tree of `row`; None where each segment is a sample."""
    return Tree(row, device, chunks) if len(row.parents) else None


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
