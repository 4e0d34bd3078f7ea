"""A packed row as tensors on the device.

Shapes: T tokens of a row, N trained tokens of it, S its samples and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from polyturn.trainer.device import to_device
from polyturn.trainer.tree import Tree, tree_of_row
from polyturn.types import PackedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """A packed row on the device. `[T]` for the row, `[N]` for its trained tokens in order of position."""

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    cu_seqlens_S: torch.Tensor
    """Where samples begin, and the length of the row, int32."""
    longest: int
    """Tokens of the longest sample."""
    tree: Tree | None = None
    """Who sees whom, where segments follow others; None where each is a sample."""
    predicting_N: torch.Tensor
    """Position whose output predicts the trained token: one before it."""
    targets_N: torch.Tensor
    temperature_N: torch.Tensor
    advantages_N: torch.Tensor
    engine_logprobs_N: torch.Tensor
    trajectory_index_N: torch.Tensor
    turn_index_N: torch.Tensor
    own_N: torch.Tensor | None = None
    """Which of the packed row's trained tokens these are, where a rank has only some; None: all."""
    part: Any = None
    """Of a row that is cut over ranks: what attention has to know of the others (`trainer.context.Part`)."""

    def of(self, values_N: torch.Tensor) -> torch.Tensor:
        """Those of the values of all trained tokens of the packed row that belong to the tokens here."""
        return values_N if self.own_N is None else values_N[self.own_N]


def to_tensors(row: PackedRow, device: torch.device) -> RowTensors:
    """The tensors of `row`; `N` counts the tokens under its loss mask."""
    trained = np.flatnonzero(row.loss_mask)
    before = trained - 1
    if len(row.parents):
        # What follows another segment is predicted by the end of that one.
        first = np.full(len(row.input_ids), -1, dtype=np.int64)
        first[row.cu_seqlens[:-1]] = np.where(row.parents >= 0, row.cu_seqlens[row.parents + 1] - 1, -1)
        before = np.where(first[trained] >= 0, first[trained], before)

    def tensor(values: Any) -> torch.Tensor:
        return to_device(values, device)

    return RowTensors(
        input_ids_T=tensor(row.input_ids),
        position_ids_T=tensor(row.position_ids),
        cu_seqlens_S=tensor(row.cu_seqlens.astype(np.int32)),
        longest=int(np.diff(row.cu_seqlens).max()),
        tree=tree_of_row(row, device),
        predicting_N=tensor(before),
        targets_N=tensor(row.input_ids[trained]),
        temperature_N=tensor(row.temperature[trained]),
        advantages_N=tensor(row.advantages[trained]),
        engine_logprobs_N=tensor(row.engine_logprobs[trained]),
        trajectory_index_N=tensor(row.trajectory_index[trained]),
        turn_index_N=tensor(row.turn_index[trained]),
    )


class RowsOnDemand(Sequence[RowTensors]):
    """Packed rows that become tensors when they are first asked for: a GPU computes one row while the next is made ready."""

    def __init__(self, rows: Sequence[PackedRow], bring: Callable[[PackedRow], RowTensors]) -> None:
        self._rows = rows
        self._bring = bring
        self._brought: dict[int, RowTensors] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> RowTensors: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowTensors]: ...
    def __getitem__(self, index: int | slice) -> RowTensors | list[RowTensors]:
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        index = range(len(self))[index]
        if index not in self._brought:
            self._brought[index] = self._bring(self._rows[index])
        return self._brought[index]


def one_sample(prompt: Sequence[int], ids: Sequence[int], device: torch.device) -> RowTensors:
    """A row of one sample whose `ids` are scored, at temperature 1."""
    whole, num_ids = [*prompt, *ids], len(ids)
    zeros = torch.zeros(num_ids, device=device)
    positions_T = torch.arange(len(whole), device=device)
    return RowTensors(
        input_ids_T=torch.tensor(whole, device=device),
        position_ids_T=positions_T,
        cu_seqlens_S=torch.tensor([0, len(whole)], dtype=torch.int32, device=device),
        longest=len(whole),
        predicting_N=positions_T[len(prompt) - 1 : -1],
        targets_N=torch.tensor(list(ids), device=device),
        temperature_N=zeros + 1,
        advantages_N=zeros,
        engine_logprobs_N=zeros,
        trajectory_index_N=zeros.long(),
        turn_index_N=zeros.long(),
    )
