"""The optimizer of a policy, and the learning rate of each of its steps.

What the trainer sees is the same whatever a recipe asks for: gradients to sum and clip, a step, and a state to save. Where
they are kept, and what a step changes first, differs: see `in_place`, `rounded` and `masters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from polyturn.config.memory import Placed
from polyturn.trainer.in_place import InPlaceOptimizer
from polyturn.trainer.masters import MasterOptimizer
from polyturn.trainer.rounded import RoundedOptimizer
from polyturn.trainer.settings import TrainerSettings


class PolicyOptimizer(Protocol):
    """What the trainer asks of it. Nothing here waits for the device, unless the optimizer lives elsewhere."""

    def gradients(self) -> list[Tensor]:
        """The gradient of every trained parameter, added up since `zero_grad`, to be changed in place before a step."""

    def step(self, learning_rate: float) -> None:
        """Change the parameters by the gradients as they are now."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """All that a later process needs to go on from here, beside the model's weights. Tensors are the live ones."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""

    def held(self) -> Placed:
        """Bytes that are held now."""


def build_optimizer(
    model: torch.nn.Module, settings: TrainerSettings, exact: Mapping[str, Tensor] | None = None
) -> InPlaceOptimizer | RoundedOptimizer | MasterOptimizer:
    """The optimizer of the trainable parameters of `model`. Raises what `update_rules.build_rule` raises.

    `exact`, by name, is where float32 copies start: what the model's own values are rounded from.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained = list(named.values())
    if settings.master_weights == "float32" or settings.offload_optimizer:
        return MasterOptimizer(trained, settings, [(exact or {}).get(name) for name in named])
    return (RoundedOptimizer if settings.master_weights == "stochastic" else InPlaceOptimizer)(trained, settings)


def clip(gradients: list[Tensor], longest: float) -> Tensor:
    """Scale `gradients` in place so that their norm, all together, is at most `longest`. Returns what it was, float32."""
    if not gradients:
        return torch.zeros(())
    # Also of bfloat16 gradients the norm is a float32 number: in bfloat16 it would be off by half a percent.
    kind = torch.promote_types(gradients[0].dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, dtype=kind)))
    clip_by(gradients, norm, longest)
    return norm


def clip_by(gradients: list[Tensor], norm: Tensor, longest: float) -> None:
    """Scale `gradients` in place by what makes a norm of `norm` one of `longest` at most."""
    torch._foreach_mul_(gradients, (longest / (norm + 1e-6)).clamp_max(1.0))


def learning_rate_at(optimizer_step: int, settings: TrainerSettings) -> float:
    """Learning rate of the optimizer step with this number, counted from 0.

    Linear warm-up from `learning_rate / warmup_steps`, then constant, or linear or cosine to `min_learning_rate_ratio` of
    the peak at `total_optimizer_steps`.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if optimizer_step < warmup:
        return peak * (optimizer_step + 1) / warmup
    if settings.schedule == "constant":
        return peak
    done = min(1.0, (optimizer_step - warmup) / max(1, settings.total_optimizer_steps - warmup))
    left = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    floor = settings.min_learning_rate_ratio
    return peak * (floor + (1 - floor) * left)
