"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math

import torch

from polyturn.trainer.settings import TrainerSettings


def build_optimizer(model: torch.nn.Module, settings: TrainerSettings) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters; weight decay leaves vectors (norms, biases) alone."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.adam_epsilon)


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
