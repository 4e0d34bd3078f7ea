"""What a bridge promises, and the checks that every bridge shares."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import torch

from polyturn.errors import PolyturnError, WeightMismatchError, WeightSyncError
from polyturn.processes.deadlines import deadline

_CHUNK_WORDS = 1 << 22
"""Words of a tensor that are summed at once: a checksum takes little memory, however large the tensor."""

MOST_NAMED = 8
"""Tensors that an error names."""

_kept_places: dict[torch.device, torch.Tensor] = {}


class WeightSource(Protocol):
    """The trainer, as a bridge sees it."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Every tensor that an engine needs, by name and in model order. Their shapes are those of whole tensors."""

    def gather(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """The whole tensors of these names, in that order. Where ranks hold shards of them this is a collective of all
        ranks, and complete when it returns.
        """


class WholeWeights:
    """The source where this process holds whole tensors: `weights` returns them.

    They are asked for once a push: listing the state of a model takes milliseconds, and there are dozens of buckets.
    """

    def __init__(self, weights: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._list = weights
        self._now: Mapping[str, torch.Tensor] | None = None

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `WeightSource.weights`."""
        self._now = self._list()
        return self._now

    def gather(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """See `WeightSource.gather`: those of the last `weights`."""
        weights = self.weights() if self._now is None else self._now
        return {name: weights[name] for name in names}


class WeightTarget(Protocol):
    """An engine, as a bridge sees it."""

    def named_weights(self) -> Mapping[str, torch.Tensor]:
        """Every tensor a push has to cover, by name."""

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> int:
        """Replace all weights and return the version now served."""


class WeightBridge(Protocol):
    """Brings the trainer's weights to the engine."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """What each phase of the last push took, also of one that failed; empty where a push is a copy in this process."""

    async def push(self, version: int) -> None:
        """Push all weights as `version`. When it returns, the engine has confirmed that version.

        Raises:
            WeightSyncError: the push did not cover every weight, or was not confirmed.
            WeightMismatchError: what the engine holds is not what the trainer has.
            DeadlineError: it took longer than its deadline.
        """

    async def hold(self, version: int) -> None:
        """Called before the trainer steps; the push of `version` follows. Where that changes what the engine computes with, it
        answers nobody from when this returns until the push does. Raises as `push` does.
        """

    async def close(self) -> None:
        """Give back what pushes took. Safe to call twice."""


async def confirmed(version: int, push: Callable[[], Awaitable[int]], deadline_s: float) -> None:
    """Await `push` to an engine in this process within `deadline_s`; it must come back with `version`.

    Raises WeightSyncError, DeadlineError, or what Polyturn raised inside.
    """
    try:
        async with deadline(deadline_s, f"weight push {version} to the engine in this process"):
            served = await push()
    except PolyturnError:
        raise
    except Exception as error:
        raise WeightSyncError(f"weight push {version} failed: {type(error).__name__}: {error}") from error
    if served != version:
        raise WeightSyncError(f"weight push {version} was not confirmed: the engine serves version {served}")


def check_coverage(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightSyncError unless `source` has exactly the tensors of `target`, with equal shapes."""
    missing = sorted(target.keys() - source.keys())
    extra = sorted(source.keys() - target.keys())
    if missing or extra:
        raise WeightSyncError(
            f"a weight push covers {len(target) - len(missing)} of the engine's {len(target)} tensors; "
            f"missing: {missing[:MOST_NAMED]}, unknown to the engine: {extra[:MOST_NAMED]}"
        )
    for name, tensor in target.items():
        if source[name].shape != tensor.shape:
            raise WeightSyncError(
                f"{name} is {tuple(source[name].shape)} in the trainer and {tuple(tensor.shape)} in the engine"
            )


def checksum(tensor: torch.Tensor, *, signed_zeros: bool = True) -> int:
    """A 64-bit sum over the bits of a tensor, weighted by place, so that swapped or changed values show.

    Without `signed_zeros` a negative zero counts as a zero: whoever can only multiply with a tensor can't tell them apart.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    flat = tensor.detach().contiguous().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK_WORDS):
        values = flat[start : start + _CHUNK_WORDS]
        chunk = (values if signed_zeros or not values.is_floating_point() else values + 0.0).view(words).to(torch.int64)
        first = start * len(chunk) // len(values)
        places = _place_weights(first, len(chunk), chunk.device) if first else _first_places(len(chunk), chunk.device)
        total += chunk.mul_(places).sum()
    return int(total)


def _first_places(count: int, device: torch.device) -> torch.Tensor:
    """Weights of the first places, kept from one tensor to the next: most tensors are one chunk, and these cost the most."""
    known = _kept_places.get(device)
    if known is None or len(known) < count:
        known = _kept_places[device] = _place_weights(0, count, device)
    return known[:count]


def _place_weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """An odd number for each place, with no pattern between places: no change of one word, and no swap, adds up to nothing."""
    place = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    place.mul_(-7046029254386353131)
    place.bitwise_xor_(place >> 31).mul_(-4658895280553007687)
    return place.bitwise_xor_(place >> 29).bitwise_or_(1)


def check_equal(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], version: int) -> None:
    """Raise WeightMismatchError naming the tensors whose checksums differ between the two sides."""
    sent = {name: checksum(source[name].to(tensor.dtype)) for name, tensor in target.items()}
    check_sums(sent, {name: checksum(tensor) for name, tensor in target.items()}, version)


def check_sums(source: Mapping[str, int], target: Mapping[str, int], version: int, where: str = "") -> None:
    """Raise WeightMismatchError naming the tensors of the engine (at `where`) whose checksums are not the trainer's."""
    wrong = [name for name, total in target.items() if source.get(name) != total]
    if wrong:
        raise WeightMismatchError(
            f"after push {version} the engine{where} differs from the trainer in {len(wrong)} of {len(target)} tensors, first "
            f"{named(wrong)}; it would sample from stale or mixed weights"
        )


def check_frozen(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightMismatchError unless the weights that are never pushed are the same on both sides."""
    differing = sorted(source.keys() ^ target.keys()) or [
        name
        for name, tensor in source.items()
        if target[name] is not tensor
        and (target[name].shape != tensor.shape or checksum(target[name].to(tensor.dtype)) != checksum(tensor))
    ]
    if differing:
        raise WeightMismatchError(
            f"the engine's base model is not the trainer's: {len(differing)} of {len(source)} frozen tensors differ, first "
            f"{named(differing)}; a push brings the adapters only, and they belong to one base"
        )


def named(names: Sequence[str]) -> str:
    """The first of `names`, as many as fit a sentence.

    >>> named(["a", "b"])
    'a, b'
    >>> named([f"layer.{number}" for number in range(10)])
    'layer.0, layer.1, layer.2, layer.3, layer.4, layer.5, layer.6, layer.7 and 2 more'
    """
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
