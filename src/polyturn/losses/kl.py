"""The KL divergence to a frozen reference, estimated per token.

Shape letters: `N` trained tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyturn.losses.ratio import LOG_LIMIT


def k3(log_gap_N: Tensor) -> Tensor:
    """exp(x) - x - 1, `[N]`: never negative, and its mean over samples of q is KL(q || p) for x = log p - log q."""
    gap_N = log_gap_N.clamp(-LOG_LIMIT, LOG_LIMIT)
    return torch.expm1(gap_N) - gap_N


def reference_kl(trainer_logprobs_N: Tensor, reference_logprobs_N: Tensor, ratio_N: Tensor | None) -> Tensor:
    """k3 of KL(pi || reference) for every token, `[N]`, times the token's pi / pi_old where `ratio_N` is given.

    The estimate is an average over samples of pi, and pi moves. With the ratio, the gradient of that average is the gradient
    of KL(pi || reference); without it, on-policy, it is that of KL(reference || pi).
    Papers: Schulman 2020, "Approximating KL divergence"; Tang and Munos 2025, arXiv 2506.09477.
    """
    kl_N = k3(reference_logprobs_N.detach() - trainer_logprobs_N)
    return kl_N if ratio_N is None else ratio_N * kl_N
