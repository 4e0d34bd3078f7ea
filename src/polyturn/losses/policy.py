"""The policy loss: ratio level x clip rule x aggregation x sampler correction, plus a KL term.

    loss = sum over tokens of  token_weight x ( sampler_weight x clip_rule(ratio, A) + beta x KL )

Shape letters: `N` trained tokens. Which algorithm this is called depends on the options alone; there is no branch on a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyturn.losses.base import LossInputs, LossResult, required
from polyturn.losses.clip import CLIP_RULES, Clipped
from polyturn.losses.kl import k3, reference_kl
from polyturn.losses.ratio import policy_ratio, token_log_ratio
from polyturn.losses.sampler import behaviour_log_gap, sampler_weights

if TYPE_CHECKING:
    from polyturn.config.schema import LossOptions


def policy_loss(inputs: LossInputs, options: LossOptions) -> LossResult:
    """The loss of one micro-batch and its metrics; the losses of the micro-batches of a step add up to the step's.

    The KL term gets neither advantage nor sampler weight. Raises ConfigError for options that `resolve_loss` has not filled.
    """
    ratio_N = policy_ratio(inputs, required(options.ratio_level, "ratio_level"))
    clip_rule = CLIP_RULES[required(options.clip_rule, "clip_rule")]
    clipped = clip_rule(ratio_N, inputs.trainer_logprobs_N, inputs.advantages_N, options)
    weight_N = _sampler_weight(inputs, options)
    kl_N = _kl(inputs, options)
    loss_N = weight_N * clipped.loss_N
    if kl_N is not None:
        loss_N = loss_N + options.beta * kl_N
    means, maxima = _metrics(inputs, ratio_N, clipped, weight_N, kl_N)
    return LossResult(loss=(inputs.token_weights_N * loss_N).sum(), metrics=means, maxima=maxima)


def needs_whole_segments(options: LossOptions, *, on_policy: bool) -> bool:
    """Whether a turn or trajectory that spans micro-batches needs its numbers computed beforehand (see `LossInputs`).

    `on_policy` says that there are no old log-probabilities: every ratio is then 1, whatever it covers.
    """
    ratio_does = options.ratio_level != "token" and not on_policy
    return ratio_does or (options.sampler_correction != "none" and options.sampler_level != "token")


def _sampler_weight(inputs: LossInputs, options: LossOptions) -> Tensor:
    if inputs.sampler_weight_N is not None:
        return inputs.sampler_weight_N.detach()
    indices = {"trajectory_index_N": inputs.trajectory_index_N, "turn_index_N": inputs.turn_index_N}
    return sampler_weights(behaviour_log_gap(inputs), options, **indices)


def _kl(inputs: LossInputs, options: LossOptions) -> Tensor | None:
    if options.beta == 0:
        return None
    reference_N = inputs.reference_logprobs_N
    assert reference_N is not None, f"beta={options.beta} needs reference_logprobs_N"
    # The token's own ratio at every ratio level: k3 is an estimate per token.
    ratio_N = token_log_ratio(inputs).exp() if options.kl_times_ratio else None
    return reference_kl(inputs.trainer_logprobs_N, reference_N, ratio_N)


def _metrics(
    inputs: LossInputs, ratio_N: Tensor, clipped: Clipped, weight_N: Tensor, kl_N: Tensor | None
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """(sum, count) pairs, and maxima; a maximum over no token is -inf."""
    log_gap_N = behaviour_log_gap(inputs)
    per_token = {
        "ratio": ratio_N,
        "clipped_low": clipped.low_N,
        "clipped_high": clipped.high_N,
        "logprob": inputs.trainer_logprobs_N,
        "sampler_weight": weight_N,
        "sampler_masked": weight_N == 0,
        "mismatch": log_gap_N.abs(),
        "mismatch_kl": k3(log_gap_N),
    }
    if kl_N is not None:
        per_token["kl"] = kl_N
    dtype, device = inputs.trainer_logprobs_N.dtype, inputs.trainer_logprobs_N.device
    count = torch.full((), len(ratio_N), dtype=dtype, device=device)
    means = {name: (value_N.detach().to(dtype).sum(), count) for name, value_N in per_token.items()}
    floor = torch.full((1,), -torch.inf, dtype=dtype, device=device)
    maxima = {
        "sampler_weight_max": torch.cat([weight_N, floor]).max(),
        "mismatch_max": torch.cat([per_token["mismatch"], floor]).max(),
    }
    return means, maxima
