"""Axis one: the importance ratio pi / pi_old, of a token, a turn or a trajectory.

Shape letters: `N` trained tokens. `sg` is stop-gradient (`detach`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyturn.losses.base import LossInputs
from polyturn.losses.segments import Level, segment_ids, segment_mean

LOG_LIMIT = 20.0
"""exp(20) is 5e8, far past any clip; beyond it float32 overflows, and inf times 0 is nan."""


def token_log_ratio(inputs: LossInputs) -> Tensor:
    """log(pi / pi_old) of every token, `[N]`; on-policy log(pi / sg[pi]), which is 0 and has the gradient of log pi."""
    old_N = inputs.old_logprobs_N if inputs.old_logprobs_N is not None else inputs.trainer_logprobs_N
    return (inputs.trainer_logprobs_N - old_N.detach()).clamp(-LOG_LIMIT, LOG_LIMIT)


def segment_log_ratio(log_ratio_N: Tensor, level: Level, *, trajectory_index_N: Tensor, turn_index_N: Tensor) -> Tensor:
    """The mean of `log_ratio_N` over each token's segment, `[N]`, without gradient."""
    ids_N = segment_ids(level, trajectory_index_N=trajectory_index_N, turn_index_N=turn_index_N)
    return segment_mean(log_ratio_N.detach(), ids_N)


def policy_ratio(inputs: LossInputs, level: Level) -> Tensor:
    """The ratio that the clip rule sees, `[N]`.

    Token: pi / pi_old. Turn and sequence: sg[s] x pi / sg[pi], with s = exp(mean of log(pi / pi_old) over the segment). Every
    token of a segment has the value s, and each has its own gradient, scaled by its own advantage. Letting the gradient flow
    through s instead would share it out evenly and erase the credit of single turns. Paper: Zheng et al. 2025, "Group Sequence
    Policy Optimization", arXiv 2507.18071 (there GSPO-token).
    """
    log_ratio_N = token_log_ratio(inputs)
    if level == "token":
        return log_ratio_N.exp()
    mean_N = inputs.segment_log_ratio_N
    if mean_N is None:
        indices = {"trajectory_index_N": inputs.trajectory_index_N, "turn_index_N": inputs.turn_index_N}
        mean_N = segment_log_ratio(log_ratio_N, level, **indices)
    gradient_N = torch.exp(inputs.trainer_logprobs_N - inputs.trainer_logprobs_N.detach())
    return mean_N.detach().clamp(-LOG_LIMIT, LOG_LIMIT).exp() * gradient_N
