"""A row's tokens cut over the ranks of a context group: which tokens are whose, and keys and values from all of them.

A row is filled up to a multiple of 2N tokens and cut into 2N chunks; rank c of N computes chunks c and 2N-1-c, so that early
and late tokens, which see few and many keys, are dealt out evenly. Keys and values of a layer are gathered whole; a query sees
those that it would see in the uncut row. What a token's output predicts lies in the row, which every rank has whole.

Shapes: T tokens of the filled row, t of this rank, N trained tokens that this rank's outputs predict.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from polyturn.trainer.device import to_device
from polyturn.trainer.row import RowTensors, to_tensors
from polyturn.trainer.tree import Tree, tree_of_row
from polyturn.types import PackedRow


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The ranks that share rows, and which of them this one is."""

    group: Any
    size: int
    number: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Chunk:
    """Neighbouring tokens of this rank, and the keys from the beginning of the first one's sample up to the last of them.

    Both are cut where samples begin. Queries of a sample are its last ones: a causal kernel aligns them with its last keys.
    """

    queries: slice
    """Within this rank's tokens."""
    keys: slice
    """Within the row."""
    cu_queries: Tensor
    cu_keys: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part:
    """What attention has to know of this rank's tokens of a row."""

    context: Context
    own_t: Tensor
    """Their places in the row."""
    segment_T: Tensor
    chunks: tuple[Chunk, ...]
    tree: Tree | None = None
    """Its queries are this rank's tokens."""
    _masks: dict[Any, Any] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """`[1, 1, t, T]`, true where a token of this rank sees a token of the row; at most the newest `window` of them."""
        if window not in self._masks:
            self._masks[window] = self._mask(window)[None, None]
        found: Tensor = self._masks[window]
        return found

    def _mask(self, window: int | None) -> Tensor:
        own_t = self.own_t
        if self.tree is not None:
            assert window is None, "a window counts places in the row"
            return self.tree.mask()[0, 0]
        back_tT = own_t[:, None] - torch.arange(len(self.segment_T), device=own_t.device)
        sees_tT = (self.segment_T[own_t][:, None] == self.segment_T) & (back_tT >= 0)
        return sees_tT if window is None else sees_tT & (back_tT < window)

    def from_all(self, own_tW: Tensor) -> Tensor:
        """The whole row of what each rank has of its own tokens, `[T, W]`. A collective, also of the backward pass."""
        if self.context.size == 1:
            return own_tW
        by_rank = _FromAll.apply(own_tW, self.context.group, self.context.size)  # type: ignore[no-untyped-call]
        early, late = by_rank.view(self.context.size, 2, -1, own_tW.shape[1]).unbind(1)
        whole: Tensor = torch.cat([early, late.flip(0)]).flatten(0, 1)
        return whole


class _FromAll(torch.autograd.Function):
    """Lays the ranks' tensors end to end; each gets back the sum of what all ranks' gradients say of its own."""

    @staticmethod
    def forward(context: Any, own_tW: Tensor, group: Any, size: int) -> Tensor:
        context.group, context.size = group, size
        by_rank = own_tW.new_empty(size * own_tW.shape[0], own_tW.shape[1])
        dist.all_gather_into_tensor(by_rank, own_tW.contiguous(), group=group)
        return by_rank

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Summed as gradients of weights are: types of 16 bits would round at every rank.
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        own = exact.new_empty(len(exact) // context.size, exact.shape[1])
        dist.reduce_scatter_tensor(own, exact, group=context.group)
        return own.to(grad.dtype), None, None


def own_tokens(length: int, context: Context) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Places in a filled row of this rank's tokens.

    >>> [own_tokens(8, Context(None, 2, number)).tolist() for number in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    chunks = np.arange(length, dtype=np.int64).reshape(2 * context.size, -1)
    return np.concatenate([chunks[context.number], chunks[-1 - context.number]])


def own_part(row: PackedRow, device: torch.device, context: Context) -> RowTensors:
    """The tensors of this rank's tokens of `row` and of the trained ones that they predict; `own_N` says which those are."""
    row = filled_up(row, 2 * context.size)
    whole = to_tensors(row, torch.device("cpu"))
    own = own_tokens(len(whole.input_ids_T), context)
    place_of = np.full(len(whole.input_ids_T), -1, dtype=np.int64)
    place_of[own] = np.arange(len(own))
    places = place_of[whole.predicting_N.numpy()]
    mine = np.flatnonzero(places >= 0)

    def selected(name: str) -> Tensor:
        which = {"T": own, "N": mine}[name[-1]]
        return to_device(getattr(whole, name).numpy()[which], device)

    kept: dict[str, Any] = {
        one.name: selected(one.name) for one in fields(whole) if one.name.endswith(("_T", "_N")) and one.name != "own_N"
    }
    return replace(
        whole,
        **kept | {"predicting_N": to_device(places[mine], device)},
        own_N=to_device(mine, device),
        cu_seqlens_S=to_device(whole.cu_seqlens_S.numpy(), device),
        tree=None,
        part=_part(row, own, device, context),
    )


def alone(length: int, device: torch.device) -> Part:
    """A whole row of one sample on this rank."""
    end = torch.tensor([0, length], dtype=torch.int32, device=device)
    every = slice(0, length)
    chunk = Chunk(queries=every, keys=every, cu_queries=end, cu_keys=end, longest_query=length, longest_key=length)
    places = torch.arange(length, device=device)
    return Part(context=Context(None, 1, 0), own_t=places, segment_T=torch.zeros_like(places), chunks=(chunk,))


def filled_up(row: PackedRow, multiple: int) -> PackedRow:
    """`row` with a sample at its end that nothing is trained on, so that its length is a multiple."""
    missing = -len(row.input_ids) % multiple
    if not missing:
        return row
    padding: dict[str, Any] = {
        one.name: np.concatenate([values, np.zeros(missing, dtype=values.dtype)])
        for one in fields(row)
        if one.name not in ("cu_seqlens", "parents")
        for values in [getattr(row, one.name)]
    }
    padding["position_ids"][-missing:] = np.arange(missing)
    padding["temperature"][-missing:] = 1
    ends = np.append(row.cu_seqlens, row.cu_seqlens[-1] + missing)
    parents = np.append(row.parents, -1) if len(row.parents) else row.parents
    return replace(row, **padding, cu_seqlens=ends, parents=parents)


def _part(row: PackedRow, own: np.ndarray[Any, np.dtype[np.int64]], device: torch.device, context: Context) -> Part:
    starts, half = row.cu_seqlens, len(own) // 2
    segments = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return Part(
        context=context,
        own_t=to_device(own, device),
        segment_T=to_device(segments, device),
        chunks=tuple(_chunk(starts, int(own[at]), slice(at, at + half), device) for at in (0, half)),
        tree=tree_of_row(row, device, [(int(own[at]), int(own[at]) + half) for at in (0, half)]),
    )


def _chunk(starts: np.ndarray[Any, np.dtype[np.int64]], first: int, queries: slice, device: torch.device) -> Chunk:
    """The chunk that begins at place `first` of a row whose samples begin at `starts`, its end with them."""
    end = first + queries.stop - queries.start
    within = starts[(starts > first) & (starts < end)]
    key_start = int(starts[starts <= first].max())
    cu_queries, cu_keys = (np.concatenate([[0], within - start, [end - start]]) for start in (first, key_start))
    return Chunk(
        queries=queries,
        keys=slice(key_start, end),
        cu_queries=to_device(cu_queries.astype(np.int32), device),
        cu_keys=to_device(cu_keys.astype(np.int32), device),
        longest_query=int(np.diff(cu_queries).max()),
        longest_key=int(np.diff(cu_keys).max()),
    )
