"""How several ranks hold one policy, as the trainer sees it: each a whole copy, or each a shard of every weight."""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from polyturn.errors import ConfigError
from polyturn.models.adapters import pushed_weights
from polyturn.trainer.context import Context
from polyturn.trainer.optimizer import PolicyOptimizer, build_optimizer, clip, clip_by
from polyturn.trainer.ranks import ProcessRanks, Ranks
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.shard_optimizer import ShardOptimizer
from polyturn.trainer.sharding import gather, shard
from polyturn.trainer.tensor_parallel import CutLayersProbe, LayerPlan, TensorGroup, is_cut

_LOST = re.compile(r"gloo|nccl|connection|timed? ?out", re.IGNORECASE)
"""What an error of torch says when a collective in a forward or backward pass did not come about."""


class Layout(Protocol):
    """What differs between the strategies."""

    lockstep: bool
    """Whether a forward pass is a collective, so that all ranks must make equally many."""

    def optimizer(self) -> PolicyOptimizer:
        """The optimizer of what this rank holds."""

    def row(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a row, the `last` of its optimizer step or not. Raises RankError."""

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """Around whatever computes with the policy. Raises RankError when another rank is missing in it."""

    def sum_and_clip(self, gradients: list[Tensor], longest: float, what: str) -> Tensor:
        """Make `gradients` those of all ranks' rows, clipped to a norm of `longest`. Returns the norm they had, float32."""

    def weights(self) -> dict[str, Tensor]:
        """What training changes, by name, with whole shapes; where they are shards, with this rank's numbers or none."""

    def whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors by name, in the type that the policy computes in; a collective of all ranks where they are shards.

        Raises RankError.
        """

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        """Take these values for those of `weights`. Called on every rank."""

    def to_fill(self, optimizer: PolicyOptimizer, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `state` gives, with a place for all that `optimizer` will keep, for saved tensors to be read to."""

    def cut_reference(self, model: torch.nn.Module) -> None:
        """Do to the KL reference what was done to the policy."""


class InPlace:
    """What is the same for whole tensors and for DTensors, which torch lets one treat alike."""

    _model: torch.nn.Module

    def weights(self) -> dict[str, Tensor]:
        """See `Layout.weights`."""
        return pushed_weights(self._model)

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        """See `Layout.overwrite`: of tensors that are cut like its own."""
        overwrite(self.weights(), weights)

    def to_fill(self, optimizer: PolicyOptimizer, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Layout.to_fill`: the live tensors."""
        return _filled_in_place(optimizer, state)


class Replicated(InPlace):
    """Every rank holds the whole policy. Ranks meet once an optimizer step, to sum their gradients, and those that share rows
    in every layer.
    """

    lockstep = False

    def __init__(
        self, model: torch.nn.Module, settings: TrainerSettings, ranks: Ranks, exact: Mapping[str, Tensor] | None
    ) -> None:
        self._model, self._settings, self._ranks, self._exact = model, settings, ranks, exact

    def optimizer(self) -> PolicyOptimizer:
        """See `Layout.optimizer`."""
        exact, self._exact = self._exact, None
        return build_optimizer(self._model, self._settings, exact)

    def row(self, *, last: bool) -> AbstractContextManager[None]:
        """See `Layout.row`."""
        return self.meeting("a forward and backward pass")

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """See `Layout.meeting`: nobody is needed, but by ranks that share rows."""
        return met(self._ranks, what) if self._settings.context_ranks > 1 else nullcontext()

    def sum_and_clip(self, gradients: list[Tensor], longest: float, what: str) -> Tensor:
        """See `Layout.sum_and_clip`."""
        self._ranks.sum_in_place(gradients, what)
        return clip(gradients, longest)

    def cut_reference(self, model: torch.nn.Module) -> None:
        """See `Layout.cut_reference`: nothing."""

    def whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        """See `Layout.whole`: they are."""
        state = self._model.state_dict()
        return {name: state[name] for name in names}


class Sharded(InPlace):
    """Every rank holds a shard of each weight, gradient and average, or of those of its copy where there are several copies.

    Weights come together layer by layer in every pass. Gradients do so at the last row of an optimizer step; until then a rank
    adds up whole ones, unless `settings.sync_every_row`.
    """

    lockstep = True

    def __init__(
        self, model: torch.nn.Module, settings: TrainerSettings, ranks: Ranks, exact: Mapping[str, Tensor] | None
    ) -> None:
        assert isinstance(ranks, ProcessRanks), "shards need processes"
        device = torch.device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # where units are brought to when they are cut
        self._model, self._settings, self._ranks = model, settings, ranks
        size = settings.shard_ranks or ranks.size
        if ranks.size % size:
            raise ConfigError(
                f"trainer.shard_ranks={size} does not divide {ranks.size} ranks: every copy of the policy is cut over as many; "
                f"use {max(part for part in range(1, size) if ranks.size % part == 0)}"
            )
        self._copies = ranks.size // size
        self._computes_in = next(model.parameters()).dtype if settings.master_weights == "float32" else None
        self._tensor: TensorGroup | None = None
        if settings.tensor_ranks > 1:
            self._cut_layers(model, device.type, exact)
        else:
            self.mesh = ranks.mesh(device.type, size)
            shard(model, self.mesh, masters=settings.master_weights == "float32", exact=exact)

    def _cut_layers(self, model: torch.nn.Module, device_type: str, exact: Mapping[str, Tensor] | None) -> None:
        """Cut the layers over neighbours, and everything over the groups of these. Raises ConfigError, ModelError."""
        self.mesh, self._tensor = tensor_groups(self._settings, self._ranks, device_type)
        masters = self._settings.master_weights == "float32"
        plan = cut_layers(
            model, self._tensor, self._ranks, lambda plan: self._shard_cut(model, plan, masters=masters, exact=exact)
        )
        self._summed = plan.summed

    def _shard_cut(self, model: torch.nn.Module, plan: LayerPlan, **options: Any) -> None:
        tensor = self._tensor
        assert tensor is not None
        shard(model, self.mesh, cut=lambda layer, name: plan.cut(layer, name, tensor), **options)

    def cut_reference(self, model: torch.nn.Module) -> None:
        """See `Layout.cut_reference`."""
        if self._tensor is None:
            shard(model, self.mesh)
        else:
            self._shard_cut(model, LayerPlan(model, self._tensor.size))

    def optimizer(self) -> PolicyOptimizer:
        """See `Layout.optimizer`."""
        # Ranks with copies of a shard draw the same noise.
        return ShardOptimizer(self._model, self._settings, rank=self._ranks.rank // self._settings.tensor_ranks)

    @contextmanager
    def row(self, *, last: bool) -> Iterator[None]:
        """See `Layout.row`."""
        cast(FSDPModule, self._model).set_requires_gradient_sync(last or self._settings.sync_every_row)
        with self.meeting("a forward and backward pass"):
            yield

    def sum_and_clip(self, gradients: list[Tensor], longest: float, what: str) -> Tensor:
        """See `Layout.sum_and_clip`: they were summed by the backward pass of the last row."""
        shares = [1.0] * len(gradients)
        if self._tensor is not None:
            trained = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
            cut = {name for name, parameter in trained.items() if is_cut(parameter, self._tensor.mesh)}
            with self.meeting(what):
                shares = self._tensor.settle(list(trained), gradients, cut=cut, summed=self._summed)
        norm = norm_of_parts(gradients, shares, self._ranks, self._copies, what)
        clip_by(gradients, norm, longest)
        return norm

    def whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        """See `Layout.whole`."""
        with self.meeting(f"the shards of {names[0] if names else 'nothing'}"):
            return gather(self._model, names, self._computes_in)

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """See `Layout.meeting`."""
        return met(self._ranks, what)


def tensor_groups(settings: TrainerSettings, ranks: ProcessRanks, device_type: str) -> tuple[DeviceMesh, TensorGroup]:
    """The ranks that hold the same of every layer as this one, and those that compute layers with it. Raises ConfigError."""
    size = settings.tensor_ranks
    if ranks.size % size:
        raise ConfigError(f"trainer.tensor_ranks={size} does not divide {ranks.size} ranks: every layer is cut over as many")
    meshes = ranks.tensor_mesh(device_type, size)
    return meshes["shards"], TensorGroup(meshes["tensor"])


def cut_layers(model: torch.nn.Module, tensor: TensorGroup, ranks: ProcessRanks, cut: Callable[[LayerPlan], None]) -> LayerPlan:
    """Have `cut` cut the layers of `model`, and see that they compute what they did. Raises ModelError."""
    plan, probe = LayerPlan(model, tensor.size), CutLayersProbe(model)
    with met(ranks, "the first pass through cut layers"):
        cut(plan)
        gap = probe.gap()
    probe.refuse(ranks.gather(gap, "the first pass through cut layers of all ranks"))
    return plan


def norm_of_parts(gradients: Sequence[Tensor], shares: Sequence[float], ranks: ProcessRanks, copies: int, what: str) -> Tensor:
    """The norm of a gradient whose parts all ranks hold, float32. `shares`: one over how many of them hold a part; `copies`:
    how often all of it is there.
    """
    squares = torch.stack([g.float().square().sum() * share for g, share in zip(gradients, shares, strict=True)]).double().sum()
    ranks.sum_in_place([squares], what)
    return (squares / copies).sqrt().float()


def context_of(settings: TrainerSettings, ranks: Ranks) -> Context | None:
    """The ranks that share rows with this one; None where each has its own. A collective of all ranks. Raises ConfigError."""
    size = settings.context_ranks
    if size == 1:
        return None
    if ranks.size % size or not isinstance(ranks, ProcessRanks):
        raise ConfigError(
            f"trainer.context_ranks={size} does not divide {ranks.size} ranks: rows are cut over as many; use one that does"
        )
    return ranks.context(size)


def _filled_in_place(optimizer: PolicyOptimizer, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`state()`, after a step that changes nothing: an optimizer makes what it keeps only when it first steps."""
    optimizer.gradients()  # zeros
    optimizer.step(0.0)
    optimizer.zero_grad()
    return state()


@torch.no_grad()
def overwrite(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` to where `own` are, by name."""
    for name, tensor in weights.items():
        own[name].copy_(tensor)


@contextmanager
def met(ranks: Ranks, what: str) -> Iterator[None]:
    """Around computing that is a collective inside. Raises RankError for what torch raises where another rank is missing."""
    assert isinstance(ranks, ProcessRanks), "who meets others has processes"
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not _LOST.search(str(error)):
            raise
        raise ranks.lost(what, error) from error


def lay_out(model: torch.nn.Module, settings: TrainerSettings, ranks: Ranks, exact: Mapping[str, Tensor] | None) -> Layout:
    """Give each rank its part of `model`, which is whole on all of them. Raises what the strategies raise."""
    if settings.parallel == "deepspeed":
        from polyturn.trainer.zero3 import Zero3

        return Zero3(model, settings, ranks, exact)
    if settings.parallel == "fsdp2":
        return Sharded(model, settings, ranks, exact)
    if settings.parallel == "zero1":
        from polyturn.trainer.state_shards import StateShards

        return StateShards(model, settings, ranks, exact)
    if settings.tensor_ranks > 1:
        from polyturn.trainer.cut_copies import CutCopies

        return CutCopies(model, settings, ranks, exact)
    return Replicated(model, settings, ranks, exact)


class ShardedWeights:
    """The trainer's weights as a bridge sees them where they are shards: gathered bucket by bucket, by all ranks."""

    def __init__(
        self, weights: Callable[[], Mapping[str, Tensor]], gather: Callable[[Sequence[str]], Mapping[str, Any]]
    ) -> None:
        self.weights = weights
        """Names and whole shapes; on this rank there are shards behind them."""
        self.gather = gather


class OnDemand(Mapping[str, Tensor]):
    """Whole tensors by name, gathered by all ranks when they are asked for, and held by nobody here.

    Whoever goes through `items` gets those of each of `together` at once: to find one tensor in a model's state takes
    milliseconds, and hundreds of small ones would take seconds.
    """

    def __init__(self, together: Iterable[Sequence[str]], gather: Callable[[Sequence[str]], Mapping[str, Tensor]]) -> None:
        self.together = [list(names) for names in together]
        self._names = dict.fromkeys(name for names in self.together for name in names)
        self.gather = gather

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self.gather([name])[name]

    def items(self) -> ItemsView[str, Tensor]:
        """See `Mapping.items`."""
        return _Items(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Items(ItemsView[str, Tensor]):
    _mapping: OnDemand

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for names in self._mapping.together:
            yield from self._mapping.gather(names).items()
