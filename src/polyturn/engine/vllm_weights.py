"""vLLM's weights under the names of transformers: views into its fused tensors, so that reading and writing need no copy.

vLLM keeps queries, keys and values in one tensor, and gate and up in another; both are cut along the rows. The vocabulary may
be padded. Every parameter gets a name, so whoever fills all of these views has replaced all that vLLM computes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyturn.errors import EngineError

_HEAD = "lm_head.weight"


def named_views(model: Any, *, tied: bool) -> dict[str, Tensor]:
    """All parameters of a model of vLLM by the names that transformers gives them, in the model's order.

    `tied`: the head is the embedding; both names then lead to one tensor. Raises EngineError for a parameter that can't be
    seen as it is, such as one of a layer that packs its weights, or a fused one whose parts are not known.
    """
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    parts_of = {fused: tuple(parts) for fused, parts in packed.items() if len(parts) > 1}
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        if parameter.numel() == 0:
            raise EngineError(
                f"vLLM keeps {name} in a form of its own, so it can't be replaced in place; use engine.kind=vllm_server"
            )
        views.update(_views(module, leaf, owner, parameter.data, parts_of))
    if tied and _HEAD not in views:
        views[_HEAD] = views[_embedding(model)]
    return views


def _views(
    module: str, leaf: str, owner: Any, data: Tensor, parts_of: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """One parameter, in parts where it is a fused one."""
    parent, _, kind = module.rpartition(".")
    if kind in parts_of:
        sizes = list(owner.output_partition_sizes)
        if len(sizes) != len(parts_of[kind]) or sum(sizes) != data.shape[0]:
            raise EngineError(
                f"vLLM's {module}.{leaf} has {data.shape[0]} rows, which are not those of {', '.join(parts_of[kind])}: {sizes}"
            )
        for part, rows in zip(parts_of[kind], torch.split(data, sizes), strict=True):
            yield f"{parent}.{part}.{leaf}", rows
        return
    known = getattr(owner, "org_vocab_size", None)
    yield f"{module}.{leaf}" if module else leaf, data if known is None else data[:known]


def _embedding(model: Any) -> str:
    """The name of the weight of the input embedding."""
    embedding = model.get_input_embeddings() if not hasattr(model, "embed_input_ids") else None
    for name, module in model.named_modules():
        if module is embedding or (embedding is None and name.endswith("embed_tokens")):
            return f"{name}.weight"
    raise EngineError(f"{type(model).__name__} of vLLM names no input embedding, so its tied head can't be found")
