"""Sums and means over the tokens of a turn or of a trajectory, spread back over those tokens.

Shape letters: `N` trained tokens.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Level: TypeAlias = Literal["token", "turn", "sequence"]
"""What one ratio or weight covers; a sequence is a whole trajectory, also when it was cut into several samples."""


def segment_ids(level: Level, *, trajectory_index_N: Tensor, turn_index_N: Tensor) -> Tensor:
    """A number per segment, from 0 on, for every token, `[N]` int64."""
    if level == "token":
        return torch.arange(len(trajectory_index_N), device=trajectory_index_N.device)
    key_N = trajectory_index_N
    if level == "turn" and len(turn_index_N):
        key_N = trajectory_index_N * (turn_index_N.max() + 1) + turn_index_N
    ids_N: Tensor = torch.unique(key_N, return_inverse=True)[1]
    return ids_N


def segment_sum(values_N: Tensor, ids_N: Tensor) -> Tensor:
    """The sum over each token's segment, `[N]`. Summed in float64: long trajectories have thousands of tokens."""
    # There are at most N segments; counting them would wait for the device.
    sums = torch.zeros(len(ids_N), dtype=torch.float64, device=values_N.device)
    return sums.index_add(0, ids_N, values_N.double())[ids_N].to(values_N.dtype)


def segment_mean(values_N: Tensor, ids_N: Tensor) -> Tensor:
    """The mean over each token's segment, `[N]`."""
    return segment_sum(values_N, ids_N) / segment_sum(torch.ones_like(values_N), ids_N)
