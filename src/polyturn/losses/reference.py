"""The same loss written as slowly and plainly as possible: loops over a padded batch, one token at a time.

It shares no code with the rest of this room and is what the fast path is tested against. Not for training.

Shape letters: `B` rows (samples) of a batch, `T` positions of a row, padding included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from polyturn.config.schema import LossOptions

Place = tuple[int, int]
"""Row and position of one token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedBatch:
    """A whole optimizer step. Tensors `[B, T]`; `trajectory_of_row` has one number a row, equal for rows of one trajectory."""

    trainer_logprobs_BT: Tensor
    old_logprobs_BT: Tensor | None
    engine_logprobs_BT: Tensor
    reference_logprobs_BT: Tensor | None
    advantages_BT: Tensor
    loss_mask_BT: Tensor
    turn_index_BT: Tensor
    trajectory_of_row: Sequence[int]


def reference_loss(batch: PaddedBatch, options: LossOptions, *, planned_trajectories: int) -> Tensor:
    """The loss of a step, a scalar that `backward` can be called on. Options as `resolve_loss` fills them."""
    num_rows, num_positions = batch.loss_mask_BT.shape
    trained = [(b, t) for b in range(num_rows) for t in range(num_positions) if batch.loss_mask_BT[b, t]]
    ratio_segments = _segments(batch, trained, options.ratio_level)
    sampler_segments = _segments(batch, trained, options.sampler_level)
    total = torch.zeros((), dtype=batch.trainer_logprobs_BT.dtype)
    for place in trained:
        loss = _sampler_weight(batch, sampler_segments[place], options) * _clipped(
            _ratio(batch, place, ratio_segments[place], options), batch, place, options
        )
        if options.beta > 0:
            loss = loss + options.beta * _kl(batch, place, options)
        total = total + loss / _divisor(batch, trained, place, options, planned_trajectories)
    return total


def _segments(batch: PaddedBatch, trained: list[Place], level: str | None) -> dict[Place, list[Place]]:
    """All trained tokens of the segment that a token belongs to."""
    members: defaultdict[object, list[Place]] = defaultdict(list)
    key_of: dict[Place, object] = {}
    for b, t in trained:
        trajectory, turn = batch.trajectory_of_row[b], int(batch.turn_index_BT[b, t])
        key_of[b, t] = {"token": (b, t), "turn": (trajectory, turn), "sequence": trajectory}[str(level)]
        members[key_of[b, t]].append((b, t))
    return {place: members[key] for place, key in key_of.items()}


def _old(batch: PaddedBatch, place: Place) -> Tensor:
    old = batch.trainer_logprobs_BT if batch.old_logprobs_BT is None else batch.old_logprobs_BT
    return old[place].detach()


def _ratio(batch: PaddedBatch, place: Place, segment: list[Place], options: LossOptions) -> Tensor:
    logprob = batch.trainer_logprobs_BT[place]
    if options.ratio_level == "token":
        return torch.exp(logprob) / torch.exp(_old(batch, place))
    log_ratios = [float(batch.trainer_logprobs_BT[member].detach() - _old(batch, member)) for member in segment]
    geometric_mean = float(torch.tensor(log_ratios, dtype=torch.float64).mean().exp())
    return geometric_mean * torch.exp(logprob) / torch.exp(logprob).detach()


def _clipped(ratio: Tensor, batch: PaddedBatch, place: Place, options: LossOptions) -> Tensor:
    advantage = float(batch.advantages_BT[place])
    if options.clip_rule == "cispo":
        assert options.clip_high is not None
        return -min(float(ratio.detach()), options.clip_high) * advantage * batch.trainer_logprobs_BT[place]
    if options.clip_rule == "sapo":
        tau = options.sapo_temperature_positive if advantage > 0 else options.sapo_temperature_negative
        assert tau is not None
        return -4.0 / tau / (1.0 + torch.exp(-tau * (ratio - 1.0))) * advantage
    assert options.clip_low is not None
    assert options.clip_high is not None
    held: Tensor | float = ratio
    if advantage >= 0 and ratio > 1.0 + options.clip_high:
        held = 1.0 + options.clip_high
    elif advantage < 0 and ratio < 1.0 - options.clip_low:
        held = 1.0 - options.clip_low
    elif advantage < 0 and options.delta is not None and ratio > options.delta:
        held = options.delta
    return torch.as_tensor(-held * advantage, dtype=ratio.dtype)


def _sampler_weight(batch: PaddedBatch, segment: list[Place], options: LossOptions) -> float:
    rho = 1.0
    for place in segment:
        rho *= float(torch.exp(_old(batch, place)) / torch.exp(batch.engine_logprobs_BT[place]))
    if options.sampler_correction == "none":
        return 1.0
    assert options.sampler_high is not None
    if options.sampler_correction == "tis":
        return min(rho, options.sampler_high)
    assert options.sampler_low is not None
    return rho if options.sampler_low <= rho <= options.sampler_high else 0.0


def _kl(batch: PaddedBatch, place: Place, options: LossOptions) -> Tensor:
    assert batch.reference_logprobs_BT is not None
    logprob, reference = batch.trainer_logprobs_BT[place], batch.reference_logprobs_BT[place]
    estimate = torch.exp(reference) / torch.exp(logprob) - (reference - logprob) - 1.0
    return estimate * torch.exp(logprob) / torch.exp(_old(batch, place)) if options.kl_times_ratio else estimate


def _divisor(batch: PaddedBatch, trained: list[Place], place: Place, options: LossOptions, planned: int) -> float:
    if options.aggregation == "token":
        return len(trained)
    if options.aggregation == "fixed":
        assert options.fixed_length is not None
        return planned * options.fixed_length
    mine = batch.trajectory_of_row[place[0]]
    trajectories = {batch.trajectory_of_row[b] for b, _ in trained}
    return len(trajectories) * sum(batch.trajectory_of_row[b] == mine for b, _ in trained)
