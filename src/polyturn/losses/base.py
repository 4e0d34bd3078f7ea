"""What a policy loss takes and gives back.

Shape letters: `N` trained tokens of one micro-batch, the positions under the loss mask laid end to end. Padding, tool text
and prompts never get here, so nothing in this room masks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from polyturn.errors import ConfigError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One micro-batch. All tensors `[N]`, on one device; floats are float32 or float64, indices int64.

    Example, two turns of one trajectory (two tokens, then one) and the only turn of another:

        trajectory_index_N   0   0   0   1
        turn_index_N         0   0   1   0

    `segment_log_ratio_N` and `sampler_weight_N` are for turns or trajectories whose tokens lie in several micro-batches: a
    mean or a product over the tokens at hand would then be wrong, so it is computed over the whole step beforehand (by
    `segment_log_ratio` and `sampler_weights`) and passed in, without gradient.
    """

    trainer_logprobs_N: Tensor
    """From this forward pass; carries the gradient."""
    old_logprobs_N: Tensor | None = None
    """The trainer's own before its first update on this batch. None on the first: the ratio is then exactly 1."""
    engine_logprobs_N: Tensor
    """The engine's while sampling."""
    reference_logprobs_N: Tensor | None = None
    """The frozen reference's; needed when `beta` is above 0."""
    advantages_N: Tensor
    token_weights_N: Tensor
    """What a token's loss is multiplied by before summing; see `polyturn.losses.aggregation`."""
    trajectory_index_N: Tensor
    """Number of the trajectory in the whole step."""
    turn_index_N: Tensor
    """Number of the turn in its trajectory."""
    segment_log_ratio_N: Tensor | None = None
    """Mean of log(pi / pi_old) over the token's turn or trajectory, at the options' ratio level."""
    sampler_weight_N: Tensor | None = None
    """Weight between trainer and engine, ready to multiply."""

    def __post_init__(self) -> None:
        shape = self.trainer_logprobs_N.shape
        assert len(shape) == 1, f"losses are flat over trained tokens, but trainer_logprobs_N is {tuple(shape)}"
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            assert value.shape == shape, f"{field.name} is {tuple(value.shape)}, trainer_logprobs_N {tuple(shape)}"
            wanted = (torch.int64,) if "index" in field.name else (torch.float32, torch.float64)
            assert value.dtype in wanted, f"{field.name} is {value.dtype}, which the loss doesn't compute in"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossResult:
    """A loss to call `backward` on, and numbers to log. Everything but `loss` is detached.

    `metrics` are (sum, count) pairs, so that micro-batches and ranks add up before the division; `maxima` are combined by max.
    Tensors, not floats: reading them would wait for the device in every micro-batch.
    """

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]]
    maxima: Mapping[str, Tensor]


def combined_metrics(results: Sequence[LossResult]) -> dict[str, float]:
    """Means and maxima over the tokens of several micro-batches, by name.

    A mean no token took part in is left out, as is a maximum over nothing.
    """
    numbers: dict[str, float] = {}
    for name in dict.fromkeys(name for result in results for name in result.metrics):
        pairs = [result.metrics[name] for result in results if name in result.metrics]
        count = sum(float(pair[1]) for pair in pairs)
        if count:
            numbers[name] = sum(float(pair[0]) for pair in pairs) / count
    for name in dict.fromkeys(name for result in results for name in result.maxima):
        largest = max(float(result.maxima[name]) for result in results if name in result.maxima)
        if largest != float("-inf"):
            numbers[name] = largest
    return numbers


def required(value: Value | None, name: str) -> Value:
    """An option that `resolve_loss` fills; ConfigError when it did not run."""
    if value is None:
        raise ConfigError(f"algorithm.loss_options.{name} is not set; fill the options with resolve_loss first")
    return value
