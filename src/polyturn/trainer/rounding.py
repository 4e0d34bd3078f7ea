"""Rounding float32 to bfloat16 at random, so that what is lost is 0 on average."""

from __future__ import annotations

import torch
from torch import Tensor

_DROPPED_BITS = 16
_KEPT = -(1 << _DROPPED_BITS)


def stochastic_bfloat16(values: Tensor, generator: torch.Generator) -> Tensor:
    """`values`, float32, as one of the two bfloat16 numbers around each, the nearer one the likelier: unbiased.

    A number that bfloat16 holds stays what it is. `generator` is on the device of `values`.
    """
    # bfloat16 is the upper half of float32. Adding a random lower half carries into the upper one with just the chance that
    # the dropped bits stand for; sign and magnitude are apart, so this holds for negative numbers too.
    noise = torch.randint(1 << _DROPPED_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(_KEPT)
    return bits.view(torch.float32).to(torch.bfloat16)
