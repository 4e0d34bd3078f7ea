"""Axis two: how a ratio far from 1 is held.

Shape letters: `N` trained tokens. `sg` is stop-gradient (`detach`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from polyturn.losses.base import required

if TYPE_CHECKING:
    from polyturn.config.schema import LossOptions


class Clipped(NamedTuple):
    """Per-token losses, and which tokens got no gradient (or a capped one) for being too low or too high. All `[N]`."""

    loss_N: Tensor
    low_N: Tensor
    high_N: Tensor


ClipRule: TypeAlias = "Callable[[Tensor, Tensor, Tensor, LossOptions], Clipped]"
"""Takes ratio, log-probabilities (both with gradient), advantages and the options."""


def two_sided(ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, options: LossOptions) -> Clipped:
    """-min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A).

    A negative advantage has no upper bound on its own, and one token of a large ratio can then outweigh a batch; `delta` caps
    it. Papers: Schulman et al. 2017, arXiv 1707.06347; Yu et al. 2025, "DAPO", arXiv 2503.14476 (clip_high above clip_low);
    Prime Intellect 2025, "INTELLECT-2", arXiv 2505.07291 (delta).
    """
    lowest = 1.0 - required(options.clip_low, "clip_low")
    highest = 1.0 + required(options.clip_high, "clip_high")
    positive_N, negative_N = advantages_N > 0, advantages_N < 0
    too_high_N = positive_N & (ratio_N > highest)
    capped_N = ratio_N
    if options.delta is not None:
        capped_N = ratio_N.clamp(max=options.delta)
        too_high_N = too_high_N | (negative_N & (ratio_N > options.delta))
    loss_N = -torch.minimum(capped_N * advantages_N, ratio_N.clamp(lowest, highest) * advantages_N)
    return Clipped(loss_N, negative_N & (ratio_N < lowest), too_high_N)


def cispo(ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, options: LossOptions) -> Clipped:
    """-sg[min(r, clip_high)] A log pi: the weight is capped, every token keeps its gradient.

    Paper: MiniMax 2025, "MiniMax-M1", arXiv 2506.13585.
    """
    cap = required(options.clip_high, "clip_high")
    weight_N = ratio_N.detach().clamp(max=cap)
    return Clipped(-weight_N * advantages_N * logprobs_N, torch.zeros_like(ratio_N, dtype=torch.bool), ratio_N > cap)


def sapo(ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, options: LossOptions) -> Clipped:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate with gradient A at r = 1; tau depends on the sign of A.

    Paper: Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv 2511.20347.
    """
    positive = required(options.sapo_temperature_positive, "sapo_temperature_positive")
    negative = required(options.sapo_temperature_negative, "sapo_temperature_negative")
    tau_N = torch.full_like(ratio_N, negative).masked_fill(advantages_N > 0, positive)
    never_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    return Clipped(-(4.0 / tau_N) * torch.sigmoid(tau_N * (ratio_N - 1.0)) * advantages_N, never_N, never_N)


CLIP_RULES: dict[str, ClipRule] = {"two_sided": two_sided, "cispo": cispo, "sapo": sapo}
