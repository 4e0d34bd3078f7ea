"""What a bridge promises, and the checks that every bridge shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from polyturn.errors import WeightSyncError

_CHUNK_WORDS = 1 << 22
"""Words of a tensor that are summed at once: a checksum takes little memory, however large the tensor."""


class WeightTarget(Protocol):
    """An engine, as a bridge sees it."""

    def named_weights(self) -> Mapping[str, torch.Tensor]:
        """Every tensor a push has to cover, by name."""

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> int:
        """Replace all weights and return the version now served."""


class WeightBridge(Protocol):
    """Brings the trainer's weights to the engine."""

    async def push(self, version: int) -> None:
        """Push all weights as `version`. When it returns, the engine has confirmed that version.

        Raises:
            WeightSyncError: the push did not cover every weight, was not confirmed, or a checksum differs.
            DeadlineError: it took longer than its deadline.
        """


def check_coverage(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightSyncError unless `source` has exactly the tensors of `target`, with equal shapes."""
    missing = sorted(target.keys() - source.keys())
    extra = sorted(source.keys() - target.keys())
    if missing or extra:
        raise WeightSyncError(
            f"a weight push covers {len(target) - len(missing)} of the engine's {len(target)} tensors; "
            f"missing: {missing[:3]}, unknown to the engine: {extra[:3]}"
        )
    for name, tensor in target.items():
        if source[name].shape != tensor.shape:
            raise WeightSyncError(
                f"{name} is {tuple(source[name].shape)} in the trainer and {tuple(tensor.shape)} in the engine"
            )


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit sum over the bits of a tensor, weighted by place, so that swapped or changed values show."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    flat = tensor.detach().contiguous().reshape(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK_WORDS):
        chunk = flat[start : start + _CHUNK_WORDS].to(torch.int64)
        total += chunk.mul_(_place_weights(start, len(chunk), chunk.device)).sum()
    return int(total)


def _place_weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """An odd number for each place, with no pattern between places: no change of one word, and no swap, adds up to nothing."""
    place = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    place.mul_(-7046029254386353131)
    place.bitwise_xor_(place >> 31).mul_(-4658895280553007687)
    return place.bitwise_xor_(place >> 29).bitwise_or_(1)


def check_equal(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], version: int) -> None:
    """Raise WeightSyncError naming the first tensors whose checksums differ between the two sides."""
    wrong = [name for name, tensor in target.items() if checksum(source[name].to(tensor.dtype)) != checksum(tensor)]
    if wrong:
        raise WeightSyncError(
            f"after push {version} the engine differs from the trainer in {len(wrong)} of {len(target)} tensors, first "
            f"{wrong[0]}; it would sample from stale or mixed weights"
        )


def check_frozen(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightSyncError unless the weights that are never pushed are the same on both sides."""
    differing = sorted(source.keys() ^ target.keys()) or [
        name
        for name, tensor in source.items()
        if target[name] is not tensor
        and (target[name].shape != tensor.shape or checksum(target[name].to(tensor.dtype)) != checksum(tensor))
    ]
    if differing:
        raise WeightSyncError(
            f"the engine's base model is not the trainer's: {len(differing)} of {len(source)} frozen tensors differ, first "
            f"{differing[0]}; a push brings the adapters only, and they belong to one base"
        )
