"""What happens to each decoder layer: its activations are kept or computed again, and its code is compiled.

Both replace what a layer runs and nothing else, so that parameters keep their names and places. Dropout stays off: a layer is
left in evaluation mode, which is why transformers' own switch, bound to training mode, is of no use here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from polyturn.errors import ModelError

Activations: TypeAlias = Literal["keep", "selective", "full"]

_ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "torch_attn::_varlen_attn", "flash_attn::_flash_attn")
_PRODUCTS = {"aten::mm": 1, "aten::addmm": 2}
"""With the place of the second matrix among their arguments."""
_THIN = 128
"""Numbers that a product sums up for each of its own, at most, to be computed again by selective recomputation.

On a GPU 2 x 128 operations take less time than writing the result and reading it back. This is for adapters: the second
product of each is as large as the layer's own, over no more numbers than its rank.
"""
_CHANGED: dict[tuple[type[torch.nn.Module], Activations, bool], type[torch.nn.Module]] = {}


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a transformers model, in order. Raises ModelError where it names none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[torch.nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} names no decoder layers, so they can't be recomputed or compiled; set "
            "trainer.activations=keep and trainer.compile=off"
        )
    return layers


def prepare_layers(model: torch.nn.Module, *, activations: Activations, compiled: bool) -> None:
    """Make every layer recompute its activations as asked, and compile it. Raises ModelError.

    A layer changes its class, not its attributes, so that a deep copy of the model runs its own layers.
    """
    if activations == "keep" and not compiled:
        return
    for layer in decoder_layers(model):
        key = (type(layer), activations, compiled)
        if key not in _CHANGED:  # one class for all layers of a kind, so that they are compiled once
            _CHANGED[key] = _changed(*key)
        layer.__class__ = _CHANGED[key]


def plain_layers(model: torch.nn.Module) -> None:
    """Undo `prepare_layers`: what generates has no use for it."""
    for module in model.modules():
        module.__class__ = getattr(type(module), "plain_class", type(module))


def _changed(kind: type[torch.nn.Module], activations: Activations, compiled: bool) -> type[torch.nn.Module]:
    """A class of layers that run as those of `kind`, and name it as `plain_class`."""
    forward: Callable[..., Any] = kind.forward
    if activations != "keep":
        forward = _recomputing(forward, selective=activations == "selective")
    if compiled:
        forward = _for_any_length(torch.compile(forward))
    return type(kind.__name__, (kind,), {"forward": forward, "plain_class": kind, "__module__": kind.__module__})


def _for_any_length(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for rows of any length at once, not for the first one's alone and then again."""

    def forward(layer: torch.nn.Module, hidden_1TH: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        length = hidden_1TH.shape[1]
        for tensor in tree_leaves((hidden_1TH, arguments, keywords)):
            if isinstance(tensor, torch.Tensor):
                varying = [place for place, size in enumerate(tensor.shape) if size == length or tensor.ndim == 1]
                torch._dynamo.maybe_mark_dynamic(tensor, varying)
        return run(layer, hidden_1TH, *arguments, **keywords)

    return forward


def _recomputing(run: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def forward(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(run, *arguments, **options, **keywords)

    return forward


def _policy(context: Any, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
    """Keep products and attention, which are dear to compute; the rest is cheap, and most of the memory."""
    name = operator.name()
    place = _PRODUCTS.get(name.partition(".")[0])
    kept = name.startswith(_ATTENTION) if place is None else arguments[place].shape[0] > _THIN
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
