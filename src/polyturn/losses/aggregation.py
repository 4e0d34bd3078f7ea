"""From per-token losses to one number: the weight of every token, for a whole optimizer step at once.

    loss of the step = sum over its tokens of token_weight x token_loss

The weights don't know about micro-batches, so neither does the gradient. Shape letters: `N` trained tokens of the step.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from polyturn.losses.base import required

Aggregation: TypeAlias = Literal["fixed", "token", "sequence"]


def token_weights(
    aggregation: Aggregation,
    trajectory_index: npt.NDArray[np.int64],
    *,
    planned_trajectories: int,
    fixed_length: int | None,
) -> npt.NDArray[np.float64]:
    """The weight of every trained token of an optimizer step, `[N]`, given the trajectory each belongs to.

    `fixed`: 1 / (planned trajectories x `fixed_length`). The divisor doesn't depend on what was sampled, which keeps an
    unbiased advantage unbiased; a trajectory that was dropped leaves the others as they were.
    `token`: 1 / N, every token alike, so that long trajectories weigh more.
    `sequence`: 1 / (trajectories x tokens of the token's trajectory), so that tokens of long trajectories weigh less.

    >>> token_weights("sequence", np.array([0, 0, 1]), planned_trajectories=2, fixed_length=None)
    array([0.25, 0.25, 0.5 ])
    """
    num_tokens = len(trajectory_index)
    if aggregation == "token":
        return np.full(num_tokens, 1.0 / max(num_tokens, 1))
    _, inverse, tokens_of = np.unique(trajectory_index, return_inverse=True, return_counts=True)
    if aggregation == "sequence":
        return np.asarray(1.0 / (len(tokens_of) * tokens_of[inverse]), dtype=np.float64)
    assert len(tokens_of) <= planned_trajectories, f"{len(tokens_of)} trajectories, {planned_trajectories} were planned"
    return np.full(num_tokens, 1.0 / (planned_trajectories * required(fixed_length, "fixed_length")))
