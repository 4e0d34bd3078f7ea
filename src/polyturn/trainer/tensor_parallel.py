"""Cuts the products within a decoder layer over neighbouring ranks: heads of attention, and the width of the feed-forward part.

What transformers' own plan of an architecture says is cut is cut: `colwise` layers by outputs, `rowwise` ones by inputs, whose
results are summed over the ranks; in the backward pass the gradients of what goes into the cut ones are. Everything else is on
all ranks of a tensor group, and computed by each: norms, embeddings, head, loss. A cut weight is a DTensor over the group, and
FSDP cuts it once more over the groups.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from polyturn.errors import ModelError
from polyturn.trainer.attention import use_plain_attention

_COLUMNS, _ROWS, _SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_PROBE_TOKENS = 7
_MOST_GAP = {torch.float32: 1e-3, torch.float64: 1e-6}
"""As of rows that are cut: of log-probabilities; types of 16 bits round too much to be held to less than 0.1."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroup:
    """The ranks that compute a layer together."""

    mesh: DeviceMesh

    @property
    def size(self) -> int:
        """How many there are."""
        return self.mesh.size()

    @property
    def number(self) -> int:
        """Which of them this one is."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> Any:
        """As torch.distributed knows them."""
        return self.mesh.get_group()

    def settle(
        self, names: Sequence[str], gradients: Sequence[Tensor], *, cut: Container[str], summed: Container[str]
    ) -> list[float]:
        """Make the gradients of what all ranks have one, and say how often each of `gradients` is there, as one over that.

        `names` are those of their parameters. Of the `cut` ones each rank has its own. Those that are `summed` are sums over
        what each rank's heads say. The others are equal on all ranks, but for the order of sums that a device may choose: their
        mean keeps the copies equal to the bit.
        """
        shares = []
        for name, gradient in zip(names, gradients, strict=True):
            if name in cut:
                shares.append(1.0)
                continue
            dist.all_reduce(gradient, group=self.group)
            if name not in summed:
                gradient /= self.size
            shares.append(1.0 / self.size)
        return shares


def is_cut(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Whether it is cut over the tensor group of `mesh`, be it cut over others too."""
    own = (mesh.mesh_dim_names or ("",))[0]
    return isinstance(parameter, DTensor) and own in (parameter.device_mesh.mesh_dim_names or ())


class LayerPlan:
    """What of a model's layers is cut, by transformers' plan of it. Raises ModelError for what we can't cut."""

    def __init__(self, model: Any, size: int) -> None:
        config = model.config
        self.kind = getattr(config, "model_type", type(model).__name__)
        everything: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        # What is outside the layers stays whole, also where a plan of transformers cuts it.
        plan = {name: how for name, how in everything.items() if "*" in name}
        self._styles = {re.compile(r"(?:.*\.)?" + re.escape(name).replace(r"\*", "[0-9]+")): how for name, how in plan.items()}
        strange = sorted({f"{name} ({how})" for name, how in plan.items() if how not in (_COLUMNS, _ROWS, _SUMMED)})
        if strange or not plan:
            why = f"their {', '.join(strange)} can't be cut by heads" if strange else "transformers has no plan of their layers"
            raise ModelError(f"trainer.tensor_ranks={size} with a model of type {self.kind}: {why}; use trainer.context_ranks")
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            count = getattr(config, key, None) or config.num_attention_heads
            if count % size:
                raise ModelError(f"trainer.tensor_ranks={size} does not divide {key}={count} of this model of type {self.kind}")
        self.summed: set[str] = set()
        """Parameters that are whole on every rank, and of which each rank has a part of the gradient."""

    def cut(self, layer: torch.nn.Module, prefix: str, group: TensorGroup) -> None:
        """Cut the layer, whose name in the model is `prefix`. Raises ModelError for a product that the plan does not know."""
        for name, module in list(layer.named_modules()):
            style = next((how for pattern, how in self._styles.items() if pattern.fullmatch(f"{prefix}.{name}")), None)
            if isinstance(module, torch.nn.Linear):
                if style not in (_COLUMNS, _ROWS):
                    raise ModelError(
                        f"trainer.tensor_ranks={group.size} with a model of type {self.kind}: {prefix}.{name} is in no plan"
                    )
                _cut_linear(module, style, group)
                if style == _COLUMNS:
                    _sum_what_comes_back(layer.get_submodule(name.rpartition(".")[0]), group)
            elif style == _SUMMED:
                self.summed |= {f"{prefix}.{name}.{own}" for own, _ in module.named_parameters()}


class CutLayersProbe:
    """A few tokens, whose log-probabilities must be those of the model before its layers were cut."""

    def __init__(self, model: Any) -> None:
        self._model, self._dtype = model, next(model.parameters()).dtype
        vocabulary = model.get_input_embeddings().weight.shape[0]
        self._ids_1T = (torch.arange(_PROBE_TOKENS) * 7919 % vocabulary)[None]
        attention = model.config._attn_implementation
        use_plain_attention(model)  # whole weights may wait on a CPU, which has no kernels of ours
        whole_TV = self._logprobs()
        if attention != model.config._attn_implementation:
            model.set_attn_implementation(attention)
        self._likely_T = whole_TV.argmax(-1, keepdim=True)
        self._wanted_T = whole_TV.gather(-1, self._likely_T)

    def gap(self) -> float:
        """The largest difference now. A collective."""
        return float((self._logprobs().gather(-1, self._likely_T) - self._wanted_T).abs().max())

    def refuse(self, gaps: Sequence[float]) -> None:
        """Raise ModelError where it is too large on some rank."""
        wrong = [gap for gap in gaps if not gap <= _MOST_GAP.get(self._dtype, 0.1)]
        if wrong:
            raise ModelError(
                f"models of type {getattr(self._model.config, 'model_type', '?')} compute something else when their layers are "
                f"cut: log-probabilities differ by {max(wrong):.2g}; set trainer.tensor_ranks=1"
            )

    @torch.no_grad()
    def _logprobs(self) -> Tensor:
        device = next(self._model.parameters()).device
        logits_TV = self._model(input_ids=self._ids_1T.to(device), use_cache=False).logits[0]
        logprobs_TV: Tensor = torch.log_softmax(logits_TV.cpu().to(torch.promote_types(logits_TV.dtype, torch.float32)), -1)
        return logprobs_TV


class _ColumnLinear(torch.nn.Linear):
    """Gives this rank's outputs."""

    def forward(self, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states, _own(self.weight), _own(self.bias))


class _RowLinear(torch.nn.Linear):
    """Takes this rank's inputs, and gives the sum over all ranks."""

    tensor_group: Any

    def forward(self, states: Tensor) -> Tensor:
        summed: Tensor = _sum(torch.nn.functional.linear(states, _own(self.weight)), self.tensor_group)
        bias: Tensor | None = self.bias
        return summed if bias is None else summed + bias


def _cut_linear(linear: torch.nn.Linear, style: str, group: TensorGroup) -> None:
    columns = style == _COLUMNS
    names = ("weight", "bias") if columns else ("weight",)
    for name in names:
        whole: Tensor | None = getattr(linear, name)
        if whole is None:
            continue
        dim = 0 if columns else 1
        own = whole.detach().chunk(group.size, dim)[group.number].contiguous()
        cut = DTensor.from_local(own, group.mesh, [Shard(dim)], run_check=False)
        setattr(linear, name, torch.nn.Parameter(cut, requires_grad=whole.requires_grad))
    if columns:
        linear.__class__ = _ColumnLinear
        linear.out_features //= group.size
    else:
        linear.__class__ = _RowLinear
        linear.in_features //= group.size
        linear.tensor_group = group.group


def _sum_what_comes_back(module: torch.nn.Module, group: TensorGroup) -> None:
    """Let the gradient of what goes into `module` be summed over the ranks, each of which has that of its own outputs."""
    if getattr(module, "polyturn_summed", False):
        return
    module.polyturn_summed = True  # type: ignore[assignment]

    def before(_: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (_copy(given[0], group.group), *given[1:]), named
        return given, {**named, "hidden_states": _copy(named["hidden_states"], group.group)}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _own(tensor: Any) -> Any:
    """The part of a weight that this rank has; gradients find back through it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, states: Tensor, group: Any) -> Tensor:
        summed = states.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, states: Tensor, group: Any) -> Tensor:
        context.group = group
        return states.view_as(states)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.clone()
        dist.all_reduce(summed, group=context.group)
        return summed, None


def _sum_states(states: Tensor, group: Any) -> Tensor:
    found: Tensor = _Sum.apply(states, group)  # type: ignore[no-untyped-call]
    return found


def _copy_states(states: Tensor, group: Any) -> Tensor:
    found: Tensor = _Copy.apply(states, group)  # type: ignore[no-untyped-call]
    return found


_sum: Any = torch.compiler.disable(_sum_states)  # type: ignore[no-untyped-call]
_copy: Any = torch.compiler.disable(_copy_states)  # type: ignore[no-untyped-call]
