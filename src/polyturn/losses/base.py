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


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Metrics of several micro-batches added up, as plain numbers: what ranks tell each other."""

    sums: Mapping[str, tuple[float, float]]
    """(sum, count) by name."""
    maxima: Mapping[str, float]

    @classmethod
    def of(cls, results: Sequence[LossResult]) -> Totals:
        """Those of `results`. Added up where they are, and read once: every read waits for the device."""
        means = list(dict.fromkeys(name for result in results for name in result.metrics))
        maxima = list(dict.fromkeys(name for result in results for name in result.maxima))
        if not means and not maxima:
            return cls(sums={}, maxima={})
        pairs = [[result.metrics[name] for result in results if name in result.metrics] for name in means]
        columns = [torch.stack([pair[place] for pair in found]).double().sum() for found in pairs for place in (0, 1)]
        columns += [torch.stack([r.maxima[name] for r in results if name in r.maxima]).double().max() for name in maxima]
        numbers = torch.stack(columns).tolist()
        sums = {name: (numbers[2 * index], numbers[2 * index + 1]) for index, name in enumerate(means)}
        return cls(sums=sums, maxima=dict(zip(maxima, numbers[2 * len(means) :], strict=True)))

    @classmethod
    def merged(cls, parts: Sequence[Totals]) -> Totals:
        """All of them together."""
        sums: dict[str, tuple[float, float]] = {}
        maxima: dict[str, float] = {}
        for part in parts:
            for name, (total, count) in part.sums.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + total, before[1] + count)
            for name, value in part.maxima.items():
                maxima[name] = max(value, maxima.get(name, float("-inf")))
        return cls(sums=sums, maxima=maxima)

    def metrics(self) -> dict[str, float]:
        """Means and maxima by name. A mean that no token took part in is left out, as is a maximum over nothing."""
        means = {name: total / count for name, (total, count) in self.sums.items() if count}
        return means | {name: value for name, value in self.maxima.items() if value != float("-inf")}


def required(value: Value | None, name: str) -> Value:
    """An option that `resolve_loss` fills; ConfigError when it did not run."""
    if value is None:
        raise ConfigError(f"algorithm.loss_options.{name} is not set; fill the options with resolve_loss first")
    return value
