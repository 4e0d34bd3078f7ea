"""Whole tensors from shards, many at a time: one collective for all that lie on the same ranks, instead of one for each.

Torch makes a single DTensor whole with `full_tensor`, which takes about a millisecond of Python; a model has hundreds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor

dist: Any = torch.distributed
Block: TypeAlias = tuple[slice, ...]
"""The part of a tensor that one rank holds."""


@torch.no_grad()
def whole_tensors(shards: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """These tensors whole, those that were cut as `dtype` where one is given; a collective of all ranks that hold parts.

    What is no DTensor, or is whole on every rank, is returned as it is. All ranks ask for the same, in the same order.
    """
    found: dict[str, Tensor] = dict(shards)
    together: dict[Any, dict[str, DTensor]] = {}
    for name, tensor in shards.items():
        if not isinstance(tensor, DTensor):
            continue
        axes = _axes(tensor.placements)
        if axes is None:
            whole: Tensor = _as(tensor, dtype).full_tensor()
            found[name] = whole
        elif not axes:
            found[name] = _as(tensor.to_local(), dtype)
        else:
            together.setdefault((tensor.device_mesh, axes, tensor.device, dtype or tensor.dtype), {})[name] = tensor
    for (mesh, axes, device, kind), cut in together.items():
        found |= _gathered(cut, mesh, axes, device, kind)
    return found


def blocks(shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int]) -> Iterator[Block]:
    """What each rank of a mesh of `sizes` holds of a tensor of `shape`, in the order of the mesh, along the axes that cut it.

    Along an axis a tensor is cut as `torch.chunk` does: the last parts may be smaller, or empty.
    """
    cutting = [axis for axis, placement in enumerate(placements) if hasattr(placement, "dim")]
    # Torch's mark for an axis that cut later than those after it: shards of what another axis had cut into parts.
    order = sorted(cutting, key=lambda axis: hasattr(placements[axis], "split_factor"))
    for place in itertools.product(*(range(sizes[axis]) for axis in cutting)):
        number = dict(zip(cutting, place, strict=True))
        starts, stops = [0] * len(shape), list(shape)
        for axis in order:
            dim = placements[axis].dim
            length = stops[dim] - starts[dim]
            step = -(-length // sizes[axis])
            first = min(length, step * number[axis])
            starts[dim], stops[dim] = starts[dim] + first, starts[dim] + min(length, first + step)
        yield tuple(map(slice, starts, stops))


def _gathered(
    shards: Mapping[str, DTensor], mesh: Any, axes: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Of tensors that are cut along `axes` of `mesh`, and nowhere else."""
    sizes = tuple(mesh.shape)
    held: dict[str, list[Block]] = {}
    places: dict[str, slice] = {}
    end = 0
    for name, tensor in shards.items():
        held[name] = list(blocks(tensor.shape, tensor.placements, sizes))
        longest = max(map(_count, held[name]))  # every rank sends as much, whoever holds less
        places[name] = slice(end, end + longest)
        end += longest
    own = torch.empty(end, dtype=dtype, device=device)
    parts = [tensor.to_local() for tensor in shards.values()]
    slots = [own[places[name].start :][: part.numel()].view(part.shape) for name, part in zip(shards, parts, strict=True)]
    _copy(slots, parts)
    all_RN = _all_gather(own, mesh, axes).view(-1, end)
    whole: dict[str, Tensor] = {}
    targets, sources = list[Tensor](), list[Tensor]()
    for name, tensor in shards.items():
        whole[name] = torch.empty(tensor.shape, dtype=dtype, device=device)
        for row_N, block in zip(all_RN, held[name], strict=True):
            if count := _count(block):
                targets.append(whole[name][block])
                sources.append(row_N[places[name].start :][:count].view(targets[-1].shape))
    _copy(targets, sources)
    return whole


def _all_gather(own_N: Tensor, mesh: Any, axes: Sequence[int]) -> Tensor:
    """The numbers of all ranks along `axes`, in the order of the mesh; bytes travel, so every backend knows the type."""
    found_B = own_N.view(torch.uint8)
    for axis in reversed(axes):
        group = mesh.get_group(axis)
        all_B = torch.empty(dist.get_world_size(group) * len(found_B), dtype=torch.uint8, device=own_N.device)
        dist.all_gather_into_tensor(all_B, found_B, group=group)
        found_B = all_B
    return found_B.view(own_N.dtype)


def _axes(placements: Sequence[Any]) -> tuple[int, ...] | None:
    """The axes of a mesh that cut a tensor; None when something else was done along one than cutting or copying."""
    if any(placement.is_partial() for placement in placements):
        return None
    return tuple(axis for axis, placement in enumerate(placements) if hasattr(placement, "dim"))


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _count(block: Block) -> int:
    return math.prod(part.stop - part.start for part in block)


def _as(tensor: Any, dtype: torch.dtype | None) -> Any:
    return tensor if dtype is None else tensor.to(dtype)
