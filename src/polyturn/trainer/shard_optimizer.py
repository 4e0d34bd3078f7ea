"""The optimizer of a rank that holds parts of a policy: the usual ones, over the parts as ordinary parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyturn.config.memory import Held, Placed
from polyturn.trainer.in_place import InPlaceOptimizer, bytes_of, forget_gradients
from polyturn.trainer.masters import MasterOptimizer
from polyturn.trainer.rounded import RoundedOptimizer
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.update_rules import numbered

_MASTER, _STEPS = "master", "steps"


class NamedOptimizer:
    """What optimizers have in common whose state is by name of the parameter, with whole shapes: see `PolicyOptimizer`.

    Every tensor of a parameter's shape is a DTensor like the parameter, or knows its whole shape in another way: a distributed
    checkpoint can cut it anew for other ranks. On as many ranks as before, a loaded one goes on exactly.
    """

    _inner: InPlaceOptimizer | RoundedOptimizer | MasterOptimizer

    def __init__(
        self, model: torch.nn.Module, settings: TrainerSettings, *, rank: int, whole: Callable[[str, Tensor], Tensor]
    ) -> None:
        self._whole = whole
        """A tensor of a parameter's state, by its name, as one that knows the whole shape; a number stays one."""
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._masters: dict[str, Tensor] = {}
        """Float32 copies of trained parameters, or shards that are that themselves: this rank's numbers."""
        self._names: dict[int, str] = {}
        """Parameters by the id of what stands for them in a rule."""
        self._seed, self._steps, self._rank = settings.seed, 0, rank

    def gradients(self) -> list[Tensor]:
        """See `PolicyOptimizer.gradients`: those of what this rank holds."""
        return self._inner.gradients()

    def step(self, learning_rate: float) -> None:
        """See `PolicyOptimizer.step`."""
        if isinstance(self._inner, RoundedOptimizer):
            # Every rank rounds other numbers than the rest, so each has noise of its own.
            self._inner.reseed(((self._seed * 1_000_003 + self._steps) * 65_537 + self._rank) % (1 << 63))
        self._inner.step(learning_rate)
        self._steps += 1

    def zero_grad(self) -> None:
        """See `PolicyOptimizer.zero_grad`."""
        self._inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """See `PolicyOptimizer.state_dict`: by name of the parameter, and how many steps were made."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self._trained}
        for rule, place, name in self._places():
            found[name] = {kind: self._whole(name, value) for kind, value in rule.state_dict()["state"].get(place, {}).items()}
        for name, master in self._masters.items():
            found[name][_MASTER] = self._whole(name, master)
        return {"parameters": found, _STEPS: self._steps}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PolicyOptimizer.load_state_dict`."""
        states: dict[int, dict[int, dict[str, Tensor]]] = {}
        for rule, place, name in self._places():
            saved = {kind: local_part(value) for kind, value in state["parameters"][name].items()}
            master = saved.pop(_MASTER, None)
            if master is not None:
                self._masters[name].copy_(master)
            if saved:
                states.setdefault(id(rule), {})[place] = saved
        for rule, _ in self._inner.rules():
            rule.load_state_dict({**rule.state_dict(), "state": states.get(id(rule), {})})
        self._steps = int(state[_STEPS])

    def held(self) -> Placed:
        """See `PolicyOptimizer.held`: this rank's part."""
        frozen = Held(weights=bytes_of(local_part(parameter) for parameter in self._frozen))
        own = self._inner.held()
        return replace(own, device=own.device + frozen)

    def _places(self) -> Iterator[tuple[torch.optim.Optimizer, int, str]]:
        """Every trained parameter by name, with its rule and its number there."""
        for rule, parameters in self._inner.rules():
            for place, parameter in enumerate(numbered(parameters)):
                yield rule, place, self._names[id(parameter)]


class ShardOptimizer(NamedOptimizer):
    """Of a `model` that is sharded; with float32 masters its shards are those masters."""

    _inner: InPlaceOptimizer | RoundedOptimizer

    def __init__(self, model: torch.nn.Module, settings: TrainerSettings, *, rank: int) -> None:
        super().__init__(model, settings, rank=rank, whole=self._sharded)
        masters = settings.master_weights == "float32"
        self._shards = [torch.nn.Parameter(local_part(parameter)) for parameter in self._trained.values()]
        self._names = {id(shard): name for name, shard in zip(self._trained, self._shards, strict=True)}
        if masters:
            self._masters = {name: local_part(parameter) for name, parameter in self._trained.items()}
        own = without_masters(settings)
        kind = RoundedOptimizer if own.master_weights == "stochastic" else InPlaceOptimizer
        self._inner = kind(self._shards, own)

    def gradients(self) -> list[Tensor]:
        """See `PolicyOptimizer.gradients`: those of the shards, which are the parameters' own memory."""
        for parameter, shard in zip(self._trained.values(), self._shards, strict=True):
            shard.grad = None if parameter.grad is None else local_part(parameter.grad)
        return super().gradients()

    def zero_grad(self) -> None:
        """See `PolicyOptimizer.zero_grad`."""
        forget_gradients(self._trained.values())
        super().zero_grad()

    def _sharded(self, name: str, value: Tensor) -> Tensor:
        like = self._trained[name]
        if not isinstance(like, DTensor) or value.ndim == 0:
            return value
        return DTensor.from_local(
            value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def without_masters(settings: TrainerSettings) -> TrainerSettings:
    """`settings` of a rule whose parameters are the masters, where there are some."""
    return replace(settings, master_weights="none") if settings.master_weights == "float32" else settings


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, sharing its memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
