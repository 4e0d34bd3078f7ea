"""The rules by which parameters move: AdamW, AdamW with 8-bit averages, SGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyturn.errors import ConfigError, MissingDependencyError
from polyturn.trainer.settings import TrainerSettings


def build_rule(parameters: Sequence[tuple[torch.nn.Parameter, int]], settings: TrainerSettings) -> torch.optim.Optimizer:
    """The rule of `settings` over `parameters`, each with the number of dimensions of the weight that it stands for.

    Weight decay leaves vectors (norms, biases) alone. Raises MissingDependencyError, and ConfigError where it can't run.
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for p, dimensions in parameters if dimensions >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p, dimensions in parameters if dimensions < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adam: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.adam_epsilon}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate, fused=True)
    if settings.optimizer == "adamw_8bit":
        return _adamw_8bit(groups, parameters[0][0].device, adam)
    return torch.optim.AdamW(groups, **adam, fused=True)


def numbered(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """`parameters` in the order in which their rule's state numbers them: matrices first."""
    return [p for p in parameters if p.ndim >= 2] + [p for p in parameters if p.ndim < 2]


def _adamw_8bit(groups: list[dict[str, Any]], device: torch.device, adam: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW of bitsandbytes, which brings compiled kernels for CUDA and runs on the CPU too.

    torchao's, the alternative, compiles one kernel for every shape of tensor when the first step is made, and wants another
    package; bitsandbytes is what 8-bit and 4-bit base weights need anyway.
    """
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"trainer.optimizer=adamw_8bit does not run on {device.type}; use trainer.optimizer=adamw")
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise MissingDependencyError(
            "trainer.optimizer=adamw_8bit needs the package bitsandbytes; pip install 'polyturn[quantization]'"
        ) from error

    class Unsynchronised(AdamW8bit):  # type: ignore[misc]
        """Its own `step` waits for the device after every parameter."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            assert closure is None, "gradients are there when a step is made"
            for group_index, group in enumerate(self.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self.init_state(group, parameter, group_index, index)
                    self.update_step(group, parameter, group_index, index)

    rule: torch.optim.Optimizer = Unsynchronised(groups, **adam)
    return rule
