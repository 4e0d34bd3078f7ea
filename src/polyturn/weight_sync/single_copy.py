"""The `single_copy` bridge: the trainer's parameters are views of the engine's tensors, in one process.

`single_copy_server` is the same with the engine in a process of its own.

The first push copies the trainer's values into the engine's tensors and lets every parameter be a view of them; from then on
the optimizer's step is the push. What is left to do is to forget keys and values of older weights, and to stamp the version.
Gradients, float32 copies and the optimizer's state stay the trainer's own.

Nothing may be generated while the optimizer steps. The synchronous loop sees to that: it trains when all trajectories are back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from polyturn.errors import WeightMismatchError, WeightSyncError
from polyturn.weight_sync.base import check_coverage, confirmed
from polyturn.weight_sync.shared_tensors import SharedTensors


class SharedTarget(Protocol):
    """An engine in this process that lets others have its tensors."""

    async def change_weights(self, change: Callable[[Mapping[str, Tensor]], None], version: int) -> int:
        """Call `change` with every weight by name while nobody is answered; return the version now served."""


class SingleCopyBridge:
    """Lets the parameters of `model` be views of the engine's tensors, which then are the only copy."""

    def __init__(self, model: torch.nn.Module, target: SharedTarget, *, deadline_s: float) -> None:
        self._model = model
        self._target = target
        self._deadline_s = deadline_s
        self._shared = False

    @property
    def seconds(self) -> dict[str, float]:
        """See `WeightBridge.seconds`: there are no phases."""
        return {}

    async def push(self, version: int) -> None:
        """See `WeightBridge.push`."""
        change = partial(refuse_new_tensors if self._shared else adopt, self._model)
        await confirmed(version, lambda: self._target.change_weights(change, version), self._deadline_s)
        self._shared = True

    async def hold(self, version: int) -> None:
        """Nothing: the loop trains when nobody in this process is waiting for an answer."""

    async def close(self) -> None:
        """Nothing to give back: the parameters keep the tensors alive for as long as somebody needs them."""


class SharedModel:
    """A model of this process as a bridge to a server beside it sees it: `single_copy_server.SharedParameters` of one rank."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._own: Mapping[str, Tensor] = {}
        self._copied: Mapping[str, slice] = {}
        """Rows of those of the model's tensors that the engine has a copy of, with a part of their rows."""

    def weights(self) -> Mapping[str, Tensor]:
        """Every tensor of the model, by name."""
        return self._model.state_dict()

    def whole(self) -> Mapping[str, Tensor]:
        """The same: this process has all of them."""
        return self.weights()

    def adopt(self, places: Sequence[SharedTensors]) -> None:
        """Make the parameters views of the tensors at the one place. Raises WeightSyncError, before they have changed."""
        refuse_other_count(places, 1)
        (place,) = places
        own = place.open()
        rows = {name: place.rows_of(name) for name in own}
        copied = {name: part for name, part in rows.items() if part is not None}
        adopt(self._model, own, copied)
        self._own, self._copied = own, copied

    def check_adopted(self) -> None:
        """Copy what is copied, and wait for the device.

        Raises WeightMismatchError unless every other parameter still is the engine's tensor.
        """
        refuse_new_tensors(self._model, self._own, self._copied)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name in self._copied:
                    self._own[name].copy_(parameter[self._copied[name]])
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def refuse_other_count(places: Sequence[SharedTensors], ranks: int) -> None:
    """Raise WeightSyncError unless there is a worker of the engine for each rank of the trainer."""
    if len(places) != ranks:
        raise WeightSyncError(
            f"the engine servers have {len(places)} workers and the trainer {ranks} ranks, each of which shares the weights of "
            "one; make engine.num_servers x engine.tensor_parallel_size and trainer.num_ranks the same"
        )


@torch.no_grad()
def adopt(model: torch.nn.Module, own: Mapping[str, Tensor], copied: Mapping[str, slice] | None = None) -> None:
    """Make the parameters of `model` views of the engine's tensors `own`, which get its values.

    Those that are `copied` stay as they are: the engine has these rows of them. Raises WeightSyncError before anything has
    changed.
    """
    copied = copied or {}
    check_coverage(
        {name: tensor[copied[name]] if name in copied else tensor for name, tensor in model.state_dict().items()}, own
    )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        theirs = own[name]
        if (theirs.dtype, theirs.device) != (parameter.dtype, parameter.device):
            raise WeightSyncError(
                f"{name} is {parameter.dtype} on {parameter.device} in the trainer and {theirs.dtype} on {theirs.device} in "
                "the engine, so there can't be one copy of it; use another weight_sync.mode, or the same for both"
            )
    _refuse_other_ties(model, own)
    for name, parameter in model.named_parameters():
        if name in copied:
            own[name].copy_(parameter[copied[name]])
        else:
            own[name].copy_(parameter)
            parameter.data = own[name]


def refuse_new_tensors(model: torch.nn.Module, own: Mapping[str, Tensor], copied: Container[str] = ()) -> None:
    """Raise WeightMismatchError unless every parameter of `model`, but for the `copied`, is still the engine's tensor."""
    for name, parameter in model.named_parameters():
        if name not in copied and parameter.data_ptr() != own[name].data_ptr():
            raise WeightMismatchError(
                f"{name} is no view of the engine's tensor any more: something gave the trainer's model new tensors, and the "
                "engine would go on with the old ones"
            )


def _refuse_other_ties(model: torch.nn.Module, own: Mapping[str, Tensor]) -> None:
    """Raise WeightSyncError unless what is one tensor in the trainer is one in the engine, and the other way round."""
    trainers = {name: parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}
    ours, theirs = _groups(trainers), _groups({name: own[name].data_ptr() for name in trainers})
    if ours != theirs:
        differing = sorted(min(group) for group in ours ^ theirs)
        raise WeightSyncError(
            f"{differing[0]} shares its tensor with another name on one side and not on the other (tied embeddings), so there "
            "can't be one copy of it; use another weight_sync.mode"
        )


def _groups(places: Mapping[str, int]) -> set[frozenset[str]]:
    """Names that share a place."""
    by_place: dict[int, set[str]] = {}
    for name, place in places.items():
        by_place.setdefault(place, set()).add(name)
    return {frozenset(names) for names in by_place.values()}
