"""What happens to each decoder layer: its activations are kept or computed again, and its code is compiled.

Both replace a layer's `forward` and nothing else, so that parameters keep their names and places. Dropout stays off: a layer is
left in evaluation mode, which is why transformers' own switch, bound to training mode, is of no use here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from polyturn.errors import ModelError

Activations: TypeAlias = Literal["keep", "selective", "full"]

_KEPT = ("aten::mm", "aten::addmm", "aten::_scaled_dot_product", "aten::_flash_attention", "torch_attn::_varlen_attn")
"""What selective recomputation keeps: products and attention, dear to compute; the rest is cheap, and most of the memory."""


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
    """Make every layer recompute its activations as asked, and compile it. Raises ModelError."""
    if activations == "keep" and not compiled:
        return
    for layer in decoder_layers(model):
        run: Callable[..., Any] = layer.forward
        if activations != "keep":
            run = _recomputing(run, selective=activations == "selective")
        if compiled:
            run = torch.compile(run)
        layer.forward = run


def _recomputing(run: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def again(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(run, *arguments, **options, **keywords)

    return again


def _policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name().startswith(_KEPT) else CheckpointPolicy.PREFER_RECOMPUTE
