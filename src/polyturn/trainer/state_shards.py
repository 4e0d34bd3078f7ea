"""Whole weights on every rank, and a part of the optimizer's state (ZeRO-1): for engines that lend each rank whole weights.

Passes and sums of gradients are those of `ddp`. Then each rank steps its own rows of every tensor, as FSDP would deal them out,
and all ranks gather the new weights into the tensors that they have: the result is that of `ddp` to the bit.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from polyturn.config.memory import Held, Placed
from polyturn.trainer.buckets import in_buckets
from polyturn.trainer.in_place import InPlaceOptimizer, bytes_of, forget_gradients, gradient_of
from polyturn.trainer.optimizer import PolicyOptimizer
from polyturn.trainer.parallel import Replicated, met
from polyturn.trainer.ranks import ProcessRanks, Ranks
from polyturn.trainer.rounded import RoundedOptimizer
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.shard_optimizer import NamedOptimizer, without_masters

_BUCKET_BYTES = 64 << 20
"""Of weights that are gathered at one time, unless a single tensor has more."""


class StateShards(Replicated):
    """See `Layout`."""

    def __init__(
        self, model: torch.nn.Module, settings: TrainerSettings, ranks: Ranks, exact: Mapping[str, Tensor] | None
    ) -> None:
        super().__init__(model, settings, ranks, exact)
        assert isinstance(ranks, ProcessRanks), "shards need processes"
        device = torch.device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._processes, self._mesh = ranks, ranks.mesh(device.type, ranks.size)

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """See `Layout.meeting`: a save gathers."""
        return met(self._processes, what)

    def optimizer(self) -> PolicyOptimizer:
        """See `Layout.optimizer`."""
        exact, self._exact = self._exact, None
        return StateShardOptimizer(self._model, self._settings, self._processes, self._mesh, exact or {})


class StateShardOptimizer(NamedOptimizer):
    """Of whole weights, of which this rank steps its rows: copies of these, in float32 where there are masters."""

    _inner: InPlaceOptimizer | RoundedOptimizer

    def __init__(
        self,
        model: torch.nn.Module,
        settings: TrainerSettings,
        ranks: ProcessRanks,
        mesh: DeviceMesh,
        exact: Mapping[str, Tensor],
    ) -> None:
        super().__init__(model, settings, rank=ranks.rank, whole=self._sharded)
        self._ranks, self._mesh = ranks, mesh
        masters = settings.master_weights == "float32"
        self._rows: dict[str, torch.nn.Parameter] = {}
        for name, parameter in self._trained.items():
            rows = self._own(exact.get(name, parameter.detach()))
            dtype = torch.float32 if masters else parameter.dtype
            self._rows[name] = torch.nn.Parameter(rows.to(parameter.device, dtype, copy=True))
        self._whole_names = {id(parameter): name for name, parameter in self._trained.items()}
        self._names = {id(rows): name for name, rows in self._rows.items()}
        if masters:
            self._masters = {name: rows.detach() for name, rows in self._rows.items()}
        own = without_masters(settings)
        self._inner = (RoundedOptimizer if own.master_weights == "stochastic" else InPlaceOptimizer)(
            [*self._rows.values()], own
        )
        self._sums: dict[str, Tensor] = {}
        """Float32 sums of the gradients of weights that have masters."""
        if masters:
            hooks = [
                parameter.register_post_accumulate_grad_hook(partial(_take, self._sums, name))  # type: ignore[no-untyped-call]
                for name, parameter in self._trained.items()
            ]
            weakref.finalize(self, _remove, hooks)

    def gradients(self) -> list[Tensor]:
        """See `PolicyOptimizer.gradients`: of whole tensors."""
        if not self._masters:
            return [gradient_of(parameter) for parameter in self._trained.values()]
        for name, parameter in self._trained.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(parameter, dtype=torch.float32)
        return [self._sums[name] for name in self._trained]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """See `PolicyOptimizer.step`. A collective; raises RankError."""
        for rows, gradient in zip(self._rows.values(), self.gradients(), strict=True):
            rows.grad = self._own(gradient)
        super().step(learning_rate)
        forget_gradients(self._rows.values())
        with met(self._ranks, "the weights of an optimizer step"):
            for bucket in in_buckets(self._trained.values(), _BUCKET_BYTES):
                self._gather(bucket)

    def zero_grad(self) -> None:
        """See `PolicyOptimizer.zero_grad`."""
        self._sums.clear()
        forget_gradients(self._trained.values())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PolicyOptimizer.load_state_dict`. Rows without masters are those of the weights as they are now."""
        super().load_state_dict(state)
        if not self._masters:
            for name, parameter in self._trained.items():
                self._rows[name].copy_(self._own(parameter))

    def held(self) -> Placed:
        """See `PolicyOptimizer.held`: whole weights and gradients, and this rank's part of the rest."""
        inner = self._inner.held().device
        gradients = [*self._sums.values(), *(one.grad for one in self._trained.values() if one.grad is not None)]
        weights = bytes_of([*self._trained.values(), *self._frozen])
        return Placed(
            device=Held(
                weights=weights,
                gradients=bytes_of(gradients),
                master=inner.weights + inner.master,
                optimizer_state=inner.optimizer_state,
            )
        )

    def _own(self, whole: Tensor) -> Tensor:
        """The rows of this rank, sharing the memory of `whole`; the last ranks may have none."""
        each = _each(whole, self._ranks.size)
        return whole[self._ranks.rank * each :][:each]

    def _sharded(self, name: str, value: Tensor) -> Tensor:
        if value.ndim == 0:
            return value
        like = self._trained[name]
        return DTensor.from_local(value, self._mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())

    def _gather(self, wholes: Sequence[torch.nn.Parameter]) -> None:
        """Give every rank all rows of these weights, in the weights' own type and memory."""
        size = self._ranks.size
        lengths = [_each(whole, size) * (whole.numel() // len(whole)) for whole in wholes]
        own = torch.zeros(sum(lengths), dtype=wholes[0].dtype, device=wholes[0].device)
        for whole, place in zip(wholes, torch.split(own, lengths), strict=True):
            rows = self._rows[self._whole_names[id(whole)]].detach().reshape(-1)
            place[: len(rows)].copy_(rows)
        every = torch.empty(size * len(own), dtype=own.dtype, device=own.device)
        dist.all_gather_into_tensor(every, own, group=self._mesh.get_group())
        for whole, parts in zip(wholes, torch.split(every.view(size, -1), lengths, dim=1), strict=True):
            whole.copy_(parts.reshape(-1)[: whole.numel()].view_as(whole))


def _each(whole: Tensor, ranks: int) -> int:
    """Rows of the first ranks."""
    return math.ceil(len(whole) / ranks)


def _take(sums: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    """Autograd has added to `parameter.grad`: add it up in float32 instead."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None, "called when there is a gradient"
    if name in sums:
        sums[name] += gradient
    else:
        sums[name] = gradient.to(torch.float32, copy=True)


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
