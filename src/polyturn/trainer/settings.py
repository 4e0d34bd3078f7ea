"""What the trainer needs to know of a recipe, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyturn.config.memory import MasterWeights, OptimizerName
from polyturn.config.schema import LossOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Optimizer, schedule and loss of a run. `total_optimizer_steps` is where linear and cosine schedules end."""

    learning_rate: float
    loss: LossOptions
    total_optimizer_steps: int
    optimizer: OptimizerName = "adamw"
    master_weights: MasterWeights = "none"
    offload_optimizer: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    min_learning_rate_ratio: float = 0.0
    max_grad_norm: float = 1.0
    num_iterations: int = 1
    activations: Literal["keep", "selective", "full"] = "keep"
    compiled: bool = False
    float32_head: bool = False
    share_prefixes: Literal["auto", "on", "off"] = "off"
    parallel: Literal["replicated", "zero1", "fsdp2", "deepspeed"] = "replicated"
    """Whether every rank holds everything, all but the whole state of the optimizer, or a shard of each weight, PyTorch's or
    DeepSpeed's."""
    shard_ranks: int | None = None
    """Ranks that one sharded copy of the weights is cut over; None: all of them."""
    context_ranks: int = 1
    """Ranks that the tokens of each row are cut over."""
    tensor_ranks: int = 1
    """Ranks that the heads and the feed-forward width of each layer are cut over."""
    sync_every_row: bool = False
    """Sum the gradients of shards after each row, which holds no whole ones between rows."""
    device: str = "cpu"
    """Where shards lie, as torch names it."""
    seed: int = 0
    """Of whatever is random in an optimizer step; the same on all ranks."""
