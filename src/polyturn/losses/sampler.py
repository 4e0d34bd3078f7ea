"""Axis four: the weight between what the trainer computes and what the engine sampled from.

Shape letters: `N` trained tokens. rho = pi_trainer / pi_engine, the trainer being the one that `pi_old` is. A segment's rho is
the product over its tokens, which is the true importance weight; over a long trajectory it leaves any bounds soon, so watch
the masked share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from polyturn.losses.base import LossInputs, required
from polyturn.losses.segments import Level, segment_ids, segment_sum

if TYPE_CHECKING:
    from polyturn.config.schema import LossOptions

Correction: TypeAlias = "Callable[[Tensor, LossOptions], Tensor]"


def behaviour_log_gap(inputs: LossInputs) -> Tensor:
    """Log rho of every token, `[N]`, without gradient.

    It spans engine to `pi_old`; the policy ratio spans `pi_old` to the present. On-policy `pi_old` is this very forward pass.
    """
    trainer_N = inputs.old_logprobs_N if inputs.old_logprobs_N is not None else inputs.trainer_logprobs_N
    return trainer_N.detach() - inputs.engine_logprobs_N


def sampler_weights(log_gap_N: Tensor, options: LossOptions, *, trajectory_index_N: Tensor, turn_index_N: Tensor) -> Tensor:
    """The weight of every token, `[N]`, without gradient; equal over a turn or trajectory at those levels."""
    level: Level = required(options.sampler_level, "sampler_level")
    ids_N = segment_ids(level, trajectory_index_N=trajectory_index_N, turn_index_N=turn_index_N)
    rho_N = segment_sum(log_gap_N.detach(), ids_N).exp()
    return CORRECTIONS[required(options.sampler_correction, "sampler_correction")](rho_N, options)


def _uncorrected(rho_N: Tensor, options: LossOptions) -> Tensor:
    return torch.ones_like(rho_N)


def _truncated(rho_N: Tensor, options: LossOptions) -> Tensor:
    return rho_N.clamp(max=required(options.sampler_high, "sampler_high"))


def _masked(rho_N: Tensor, options: LossOptions) -> Tensor:
    low, high = required(options.sampler_low, "sampler_low"), required(options.sampler_high, "sampler_high")
    return torch.where((rho_N >= low) & (rho_N <= high), rho_N, torch.zeros_like(rho_N))


# mis and icepop are one function; they differ in their usual bounds (from above only, and from both sides).
CORRECTIONS: dict[str, Correction] = {"none": _uncorrected, "tis": _truncated, "mis": _masked, "icepop": _masked}
