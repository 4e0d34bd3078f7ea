"""Bfloat16 parameters without float32 copies: each step is made in float32 and rounded at random, so that nothing is lost on
average. Parameters become float32 for the length of their own update only, a few at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyturn.config.memory import Held, Placed
from polyturn.trainer.buckets import in_buckets
from polyturn.trainer.in_place import apply, bytes_of, forget_gradients, gradient_bytes, gradient_of, state_bytes
from polyturn.trainer.rounding import stochastic_bfloat16
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.update_rules import build_rule

_BUCKET_BYTES = 64 << 20
"""Of the parameters that are float32 at one time, unless a single tensor has more."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters that are updated together, and what stands for each of them in `rule`: empty between two steps."""

    parameters: list[torch.nn.Parameter]
    shadows: list[torch.nn.Parameter]
    rule: torch.optim.Optimizer

    @torch.no_grad()
    def step(self, learning_rate: float, generator: torch.Generator) -> None:
        for parameter, shadow in zip(self.parameters, self.shadows, strict=True):
            shadow.data = parameter.detach().float()
            shadow.grad = gradient_of(parameter).float()
        apply(self.rule, learning_rate)
        for parameter, shadow in zip(self.parameters, self.shadows, strict=True):
            parameter.copy_(stochastic_bfloat16(shadow.detach(), generator))
            shadow.grad = None
            shadow.data = _nothing(shadow.device)


class RoundedOptimizer:
    """See `PolicyOptimizer`. Gradients are added up in bfloat16, averages are kept in float32.

    The noise comes from `settings.seed` and the steps made so far: ranks that hold the same gradients stay the same.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], settings: TrainerSettings) -> None:
        self._parameters = list(parameters)
        self._buckets = []
        for bucket in in_buckets(parameters, _BUCKET_BYTES):
            shadows = [torch.nn.Parameter(_nothing(parameter.device)) for parameter in bucket]
            stands_for = [(shadow, parameter.ndim) for shadow, parameter in zip(shadows, bucket, strict=True)]
            self._buckets.append(_Bucket(bucket, shadows, build_rule(stands_for, settings)))
        self._generator = torch.Generator(device=parameters[0].device).manual_seed(settings.seed)

    def gradients(self) -> list[Tensor]:
        """See `PolicyOptimizer.gradients`."""
        return [gradient_of(parameter) for parameter in self._parameters]

    def step(self, learning_rate: float) -> None:
        """See `PolicyOptimizer.step`."""
        for bucket in self._buckets:
            bucket.step(learning_rate, self._generator)

    def zero_grad(self) -> None:
        """See `PolicyOptimizer.zero_grad`."""
        forget_gradients(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """See `PolicyOptimizer.state_dict`."""
        return {"rules": [bucket.rule.state_dict() for bucket in self._buckets], "noise": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PolicyOptimizer.load_state_dict`."""
        for bucket, rule in zip(self._buckets, state["rules"], strict=True):
            bucket.rule.load_state_dict(rule)
        self._generator.set_state(state["noise"])

    def rules(self) -> list[tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]]:
        """Each rule with the parameters that its own stand for."""
        return [(bucket.rule, bucket.parameters) for bucket in self._buckets]

    def reseed(self, seed: int) -> None:
        """The noise of the next step comes from `seed`."""
        self._generator.manual_seed(seed)

    def held(self) -> Placed:
        """See `PolicyOptimizer.held`."""
        return Placed(
            device=Held(
                weights=bytes_of(self._parameters),
                gradients=gradient_bytes(self._parameters),
                master=bytes_of(shadow for bucket in self._buckets for shadow in bucket.shadows),
                optimizer_state=state_bytes(bucket.rule for bucket in self._buckets),
            )
        )


def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)
