"""Bytes that weights, gradients and the optimizer take, by kind and place, for every switch of the recipe.

Exact for one tensor, so that a plan adds up the tensors of a model; activations, the KV cache and what a library takes for
itself are not in it. The tests hold these numbers against what is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

OptimizerName: TypeAlias = Literal["adamw", "adamw_8bit", "sgd"]
MasterWeights: TypeAlias = Literal["float32", "stochastic", "none"]
Quantize: TypeAlias = Literal["8bit", "4bit"]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
SMALLEST_8BIT_TENSOR = 4096
"""Smaller ones keep float32 averages: they are few, and norms and biases are touchy."""
BLOCK_8BIT = 256
"""Numbers of an average that share a float32 scale."""
BLOCK_4BIT, BLOCK_SCALES = 64, 256
"""Weights that share an 8-bit scale, and scales that share a float32 scale of theirs."""
TABLES_4BIT = 4 * (16 + 256 + 1)
"""Of each tensor: what its 16 values mean, what the 256 values of a scale mean, and the mean of the scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that are held from one optimizer step to the next, and of gradients from the first row of a step to its end."""

    weights: float = 0
    """As the model computes with them."""
    gradients: float = 0
    master: float = 0
    """Float32 copies that the optimizer changes in place of the weights."""
    optimizer_state: float = 0

    @property
    def total(self) -> float:
        """All kinds together."""
        return self.weights + self.gradients + self.master + self.optimizer_state

    def __add__(self, other: Held) -> Held:
        return Held(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What lies on the trainer's device, and what in CPU memory because of an offload."""

    device: Held
    cpu: Held = Held()

    def __add__(self, other: Placed) -> Placed:
        return Placed(device=self.device + other.device, cpu=self.cpu + other.cpu)


def trained_tensor(
    numel: int, *, dtype: str, optimizer: OptimizerName, master_weights: MasterWeights, offload: bool = False
) -> Placed:
    """Bytes of one trained tensor of `numel` numbers. `master_weights` is the resolved one."""
    width = ELEMENT_BYTES[dtype]
    masters = master_weights == "float32" or offload
    # Averages are of the type of what is stepped: masters and weights that are rounded at random are float32 meanwhile.
    state = _state_bytes(numel, optimizer, 4 if masters or master_weights == "stochastic" else width)
    gradients = (4 if masters else width) * numel
    if offload:
        # Gradients and new weights pass through a buffer of the weights' own type.
        away = Held(gradients=gradients + width * numel, master=4 * numel, optimizer_state=state)
        return Placed(device=Held(weights=width * numel), cpu=away)
    return Placed(
        device=Held(weights=width * numel, gradients=gradients, master=4 * numel if masters else 0, optimizer_state=state)
    )


def frozen_tensor(numel: int, *, dtype: str, quantize: Quantize | None = None, rows: int = 1) -> Placed:
    """Bytes of one tensor that is not trained; `quantize` where it is the weight of a quantized layer, of `rows` outputs."""
    if quantize == "8bit":
        held = numel + 4 * rows
    elif quantize == "4bit":
        scales = math.ceil(numel / BLOCK_4BIT)
        held = math.ceil(numel / 2) + scales + 4 * math.ceil(scales / BLOCK_SCALES) + TABLES_4BIT
    else:
        held = ELEMENT_BYTES[dtype] * numel
    return Placed(device=Held(weights=held))


def per_parameter(*, dtype: str, optimizer: OptimizerName, master_weights: MasterWeights, offload: bool = False) -> Placed:
    """Bytes for each trained parameter of a large tensor, where the few bytes that every tensor takes don't count."""
    large = 1 << 30
    whole = trained_tensor(large, dtype=dtype, optimizer=optimizer, master_weights=master_weights, offload=offload)
    return Placed(**{place: _divided(getattr(whole, place), large) for place in ("device", "cpu")})


def adapter_parameters(inputs: int, outputs: int, rank: int) -> int:
    """Trained parameters of the adapter beside one linear layer."""
    return rank * (inputs + outputs)


def _state_bytes(numel: int, optimizer: OptimizerName, width: int) -> int:
    if optimizer == "sgd":
        return 0
    if optimizer == "adamw":
        return 2 * width * numel + 4  # and the count of its steps
    if numel < SMALLEST_8BIT_TENSOR:
        return 2 * 4 * numel
    return 2 * (numel + 4 * math.ceil(numel / BLOCK_8BIT))


def _divided(held: Held, count: int) -> Held:
    return Held(**{field.name: round(getattr(held, field.name) / count, 6) for field in fields(held)})
