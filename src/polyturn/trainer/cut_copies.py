"""Copies of the policy, each cut over the ranks of a tensor group by layers alone: what an engine that is cut so can lend.

A rank holds plain tensors: its heads and its width of every layer, and all of the rest (embeddings, norms, head). They are
those of an engine's worker in shape, so that the two can be one (`weight_sync.mode=single_copy`). For optimizers they are
ordinary parameters; for checkpoints and pushes they are known as parts of wholes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from polyturn.models.adapters import pushed_weights
from polyturn.trainer.layers import decoder_layers
from polyturn.trainer.masters import MasterOptimizer
from polyturn.trainer.optimizer import PolicyOptimizer, build_optimizer, clip_by
from polyturn.trainer.parallel import InPlace, cut_layers, met, norm_of_parts, tensor_groups
from polyturn.trainer.ranks import ProcessRanks, Ranks
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.shard_optimizer import NamedOptimizer, local_part
from polyturn.trainer.sharding import gather
from polyturn.trainer.tensor_parallel import LayerPlan


class Cuts:
    """Which tensors of a model are cut over the ranks of `mesh`, and how."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._placements: dict[str, tuple[Placement, ...]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._placements

    def take(self, model: torch.nn.Module) -> None:
        """Note which parameters of `model` are cut, and make them plain tensors again: this rank's parts."""
        for name, parameter in list(model.named_parameters()):
            if not isinstance(parameter, DTensor):
                continue
            self._placements[name] = parameter.placements
            above, _, own = name.rpartition(".")
            part = torch.nn.Parameter(local_part(parameter), requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(above), own, part)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The tensor of which this rank has `part`, sharing its memory, with the whole shape. A number stays one."""
        if name not in self._placements or part.ndim == 0:
            return part
        return DTensor.from_local(part.detach(), self._mesh, self._placements[name], run_check=False)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank has of a whole tensor."""
        for placement in self._placements.get(name, ()):
            assert isinstance(placement, Shard), "layers are cut by rows or by columns"
            whole = whole.chunk(self._mesh.size(), placement.dim)[self._mesh.get_local_rank()]
        return whole


class CutCopies(InPlace):
    """See `Layout`. Ranks of a group meet in every layer, and all of them once an optimizer step, to sum gradients."""

    lockstep = True

    def __init__(
        self, model: torch.nn.Module, settings: TrainerSettings, ranks: Ranks, exact: Mapping[str, Tensor] | None
    ) -> None:
        assert isinstance(ranks, ProcessRanks), "layers are cut over processes"
        device = torch.device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._model, self._settings, self._ranks, self._exact = model, settings, ranks, exact
        self._across, self._tensor = tensor_groups(settings, ranks, device.type)
        self._cuts = Cuts(self._tensor.mesh)
        self._summed = cut_layers(model, self._tensor, ranks, self._cut_policy).summed

    def cut_reference(self, model: torch.nn.Module) -> None:
        """See `Layout.cut_reference`."""
        self._cut(model, LayerPlan(model, self._tensor.size), Cuts(self._tensor.mesh))

    def optimizer(self) -> PolicyOptimizer:
        """See `Layout.optimizer`."""
        exact, self._exact = self._exact, None
        parts = None if exact is None else {name: self._cuts.part(name, value) for name, value in exact.items()}
        return CutOptimizer(self._model, self._settings, self._cuts, parts)

    def row(self, *, last: bool) -> AbstractContextManager[None]:
        """See `Layout.row`."""
        return self.meeting("a forward and backward pass")

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """See `Layout.meeting`."""
        return met(self._ranks, what)

    def sum_and_clip(self, gradients: list[Tensor], longest: float, what: str) -> Tensor:
        """See `Layout.sum_and_clip`."""
        names = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        with self.meeting(what):
            shares = self._tensor.settle(names, gradients, cut=self._cuts, summed=self._summed)
        copies = self._across.size()
        if copies > 1:
            self._ranks.sum_in_place(gradients, what, group=self._across.get_group())
        norm = norm_of_parts(gradients, shares, self._ranks, copies, what)
        clip_by(gradients, norm, longest)
        return norm

    def weights(self) -> dict[str, Tensor]:
        """See `Layout.weights`."""
        return {name: self._cuts.whole(name, part) for name, part in pushed_weights(self._model).items()}

    def whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        """See `Layout.whole`."""
        with self.meeting(f"the parts of {names[0] if names else 'nothing'}"):
            return gather(self._model, names, shard_of=self._cuts.whole)

    def _cut_policy(self, plan: LayerPlan) -> None:
        """Cut the policy, and bring what is left of it to this rank's device."""
        self._cut(self._model, plan, self._cuts)
        self._model.to(self._settings.device)

    def _cut(self, model: torch.nn.Module, plan: LayerPlan, cuts: Cuts) -> None:
        """Cut the layers where they are."""
        names = {module: name for name, module in model.named_modules()}
        for layer in decoder_layers(model):
            plan.cut(layer, names[layer], self._tensor)
        cuts.take(model)


class CutOptimizer(NamedOptimizer):
    """Of a `model` whose parameters are this rank's parts, `cuts` of which make wholes. `exact` are parts too."""

    def __init__(
        self, model: torch.nn.Module, settings: TrainerSettings, cuts: Cuts, exact: Mapping[str, Tensor] | None
    ) -> None:
        super().__init__(model, settings, rank=0, whole=cuts.whole)  # the same noise on all ranks keeps copies equal
        self._inner = build_optimizer(model, settings, exact)
        stands_for: Sequence[Tensor] = list(self._trained.values())
        if isinstance(self._inner, MasterOptimizer):
            ((_, stands_for),) = self._inner.rules()
            self._masters = {name: copy.detach() for name, copy in zip(self._trained, stands_for, strict=True)}
        self._names = {id(one): name for name, one in zip(self._trained, stands_for, strict=True)}
