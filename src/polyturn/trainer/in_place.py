"""Parameters that the optimizer changes themselves: float32 weights, or bfloat16 ones whose lost updates don't matter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyturn.config.memory import Held, Placed
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.update_rules import build_rule


class InPlaceOptimizer:
    """See `PolicyOptimizer`. Gradients are added up where autograd adds them, in the type of the parameters."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], settings: TrainerSettings) -> None:
        self._parameters = list(parameters)
        self._rule = build_rule([(parameter, parameter.ndim) for parameter in parameters], settings)

    def gradients(self) -> list[Tensor]:
        """See `PolicyOptimizer.gradients`."""
        return [gradient_of(parameter) for parameter in self._parameters]

    def step(self, learning_rate: float) -> None:
        """See `PolicyOptimizer.step`."""
        apply(self._rule, learning_rate)

    def zero_grad(self) -> None:
        """See `PolicyOptimizer.zero_grad`."""
        forget_gradients(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """See `PolicyOptimizer.state_dict`."""
        return {"rule": self._rule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PolicyOptimizer.load_state_dict`."""
        self._rule.load_state_dict(state["rule"])

    def rules(self) -> list[tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]]:
        """Each rule with its parameters."""
        return [(self._rule, self._parameters)]

    def held(self) -> Placed:
        """See `PolicyOptimizer.held`."""
        return Placed(
            device=Held(
                weights=bytes_of(self._parameters),
                gradients=gradient_bytes(self._parameters),
                optimizer_state=state_bytes([self._rule]),
            )
        )


# ── what the other optimizers do too ───────────────────────────────────────────────────────────────────────────────────


def apply(rule: torch.optim.Optimizer, learning_rate: float) -> None:
    """One step of `rule` at this rate."""
    for group in rule.param_groups:
        group["lr"] = learning_rate
    rule.step()


def gradient_of(parameter: torch.nn.Parameter) -> Tensor:
    """Its gradient; zeros where nothing came, so that a parameter is treated alike on every rank, with or without rows."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def forget_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give their gradients back."""
    for parameter in parameters:
        parameter.grad = None


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the numbers in `tensors`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def gradient_bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Bytes of the gradients that are there."""
    return bytes_of(parameter.grad for parameter in parameters if parameter.grad is not None)


def state_bytes(rules: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of what the rules remember of each parameter; the two tables of 8-bit averages, shared by all, don't count."""
    return bytes_of(
        value
        for rule in rules
        for state in rule.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.startswith("qmap")
    )
