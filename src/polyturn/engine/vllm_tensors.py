"""What a vLLM worker holds, tensor by tensor, under the names that checkpoints use.

vLLM fuses projections (`qkv_proj`, `gate_up_proj`), pads the vocabulary, cuts layers over tensor-parallel ranks, and on CPUs
keeps a packed copy of a weight in place of it. `held_tensors` undoes all of that, and reads a packed copy the only way there
is: by multiplying the identity with it, which is what the model does with an activation. So a layer that computes with other
numbers than its parameter shows, such as a tied head whose packed copy is of older weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

_BASE = ".base_layer"
"""vLLM's word for the layer inside one that takes adapters."""
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "PlainLinear", "PlainEmbedding")
"""Ways to compute of vLLM, and two of ours, that leave parameters as they were loaded; on CPUs `cpu_linear` says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a checkpoint, as a worker has it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """The whole; a collective of the tensor-parallel ranks where it is cut."""
    part: Callable[[], torch.Tensor]
    """What this rank has of it. Raises UnknownLayerError where others have the same part."""
    first_row: int | None = None
    """Where the part begins, of one that is cut by the vocabulary, in which ranks may have unequal parts."""


class UnknownLayerError(RuntimeError):
    """A layer whose parameters have no checkpoint names that this module knows."""


def described_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Meta tensors by checkpoint name, in the model's order: whole shapes, whatever this rank holds of them.

    Raises UnknownLayerError for a layer that `held_tensors` can't undo either.
    """
    return {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in _walk(model)}


def held_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by checkpoint name, one module at a time. A collective of the tensor-parallel ranks."""
    for entry in _walk(model):
        yield entry.name, entry.read()


def own_parts(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """What this rank has of every tensor, by checkpoint name, and the first rows of those that are cut by the vocabulary."""
    parts, first_rows = dict[str, torch.Tensor](), dict[str, int]()
    for entry in _walk(model):
        parts[entry.name] = entry.part()
        if entry.first_row is not None and len(parts[entry.name]) < entry.shape[0]:
            first_rows[entry.name] = entry.first_row
    return parts, first_rows


def plain_tensors(model: Any) -> dict[str, torch.Tensor] | None:
    """Every tensor by checkpoint name as a view of the model's own, where filling these is all that a reload does.

    None where it is not: parts of other ranks, packed or quantized layers, values that a layer derives from its weights.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size

    modules = list(model.modules())
    if get_tensor_model_parallel_world_size() > 1 or not_covered(model):
        return None
    if any(derives(module) or hasattr(module, "cpu_linear") for module in modules):
        return None
    found = dict(held_tensors(model))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return found if all(tensor.untyped_storage().data_ptr() in own for tensor in found.values()) else None


def aliases(model: Any) -> dict[str, str]:
    """Names of a tied head's weight, and of the embedding that it is."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            tied[name.replace(_BASE, "")] = other.replace(_BASE, "")
    return tied


def adapter_tensors(adapters: Any, fused: Mapping[str, list[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of loaded adapters by PEFT's names; those of fused layers lie in lists, one entry a part."""
    for module, layer in adapters.loras.items():
        above, dot, last = module.rpartition(".")
        packed = isinstance(layer.lora_a, list | tuple)
        parts = fused[last] if packed else [last]
        for letter, matrices in (("A", layer.lora_a), ("B", layer.lora_b)):
            for part, matrix in zip(parts, matrices if packed else [matrices], strict=True):
                if matrix is not None:
                    yield f"{above}{dot}{part}.lora_{letter}.weight", matrix


def not_covered(model: Any) -> list[str]:
    """Parameters of which some number belongs to no tensor that `own_parts` has, by vLLM's names. Rows that only pad the
    vocabulary belong to none.
    """
    seen: dict[int, set[tuple[int, int]]] = {}
    needed: dict[int, int] = {}
    names: dict[int, str] = {}
    unknown: list[str] = []
    for place, module, name, parameter, parts in _parameters(model):
        try:
            read = [entry.part() for entry in _read(module, name, parameter, parts)]
        except UnknownLayerError:
            unknown.append(f"{place}.{name}")
            continue
        views = seen.setdefault(id(parameter), set())
        views.update((tensor.data_ptr(), tensor.numel()) for tensor in read)
        padding = 0
        if hasattr(module, "org_vocab_size") and parameter.numel():
            padding = parameter[0].numel() * max(0, len(parameter) - _own_rows(module)[1])
        needed[id(parameter)] = parameter.numel() - padding
        names.setdefault(id(parameter), f"{place}.{name}")
    return unknown + [names[key] for key, views in seen.items() if sum(size for _, size in views) < needed[key]]


def derives(module: Any) -> bool:
    """Whether a layer computes with values that it made of its parameters once: quantized, or latent attention."""
    if type(module).__name__ == "Attention":  # what it derives are the scales of a quantized cache
        return False
    method = getattr(module, "quant_method", None)
    return hasattr(module, "process_weights_after_loading") or (method is not None and type(method).__name__ not in _PLAIN)


def _walk(model: Any) -> Iterator[Entry]:
    """Every tensor, in the model's order."""
    for _, module, name, parameter, parts in _parameters(model):
        yield from _read(module, name, parameter, parts)


def _parameters(model: Any) -> Iterator[tuple[str, Any, str, Any, list[str]]]:
    """Every parameter: the place of its module, the module, its own name there, itself, and the names of its parts."""
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for prefix, module in model.named_modules(remove_duplicate=False):
        place = prefix.replace(_BASE, "")
        last = place.rpartition(".")[2]
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield (
                place,
                module,
                name,
                parameter,
                [f"{place.removesuffix(last)}{part}.{name}" for part in fused.get(last, [last])],
            )


def _read(module: Any, name: str, parameter: Any, names: list[str]) -> Iterator[Entry]:
    kind = type(module).__name__
    if hasattr(module, "org_vocab_size"):
        # An embedding looks rows up in its parameter; a head multiplies, on CPUs with its packed copy.
        as_head = kind == "ParallelLMHead" or names[0].startswith("lm_head.")
        whole = (module.org_vocab_size, *((module.embedding_dim,) if name == "weight" else ()))
        first, count = _own_rows(module)

        def local() -> torch.Tensor:
            return _local(module, name, parameter) if as_head else cast(torch.Tensor, parameter.detach())

        yield Entry(
            name=names[0],
            shape=whole,
            dtype=parameter.dtype,
            read=lambda: _gathered(local(), 0)[: module.org_vocab_size],
            part=lambda: local()[:count],
            first_row=first,
        )
    elif hasattr(module, "input_is_parallel") and name == "weight":
        # A row-parallel layer: its columns are cut, and its bias is whole on every rank.
        yield Entry(
            name=names[0],
            shape=(module.output_size, module.input_size),
            dtype=parameter.dtype,
            read=lambda: _gathered(_local(module, name, parameter), 1),
            part=lambda: _local(module, name, parameter),
        )
    elif hasattr(module, "output_partition_sizes") and not hasattr(module, "input_is_parallel") and name in ("weight", "bias"):
        yield from _columns(module, name, parameter, names)
    elif parameter.dim() <= 1 and len(names) == 1:
        # Norms, and biases of row-parallel layers: the same on every rank.
        yield Entry(
            name=names[0], shape=tuple(parameter.shape), dtype=parameter.dtype, read=parameter.detach, part=parameter.detach
        )
    else:
        shape = tuple(parameter.shape)
        raise UnknownLayerError(f"{names[0]}: a {kind} has a parameter of shape {shape}, which is not known here")


def _columns(module: Any, name: str, parameter: Any, names: list[str]) -> Iterator[Entry]:
    """The parts of a layer whose rows lie one part after the other, each cut over the ranks."""
    sizes = list(module.output_partition_sizes)
    if len(sizes) != len(names):
        if len(names) != 1:
            raise UnknownLayerError(f"{names[0]}: {len(sizes)} parts, and {len(names)} names")
        sizes = [sum(sizes)]
    start = 0
    for number, (whole_name, rows) in enumerate(zip(names, sizes, strict=True)):
        # With fewer key heads than ranks, several ranks hold the same ones.
        copies = getattr(module, "num_kv_head_replicas", 1) if number > 0 else 1
        whole = rows * _ranks(module) // copies
        shape = (whole, module.input_size) if name == "weight" else (whole,)

        def read(start: int = start, rows: int = rows, copies: int = copies) -> torch.Tensor:
            every = _gathered(_local(module, name, parameter)[start : start + rows], 0, one=_ranks(module) == 1)
            return (
                every
                if copies == 1
                else torch.cat([every[start : start + rows] for start in range(0, len(every), rows * copies)])
            )

        def part(start: int = start, rows: int = rows, copies: int = copies, of: str = whole_name) -> torch.Tensor:
            if copies > 1:
                raise UnknownLayerError(f"{of}: {copies} ranks have the same heads of keys")
            return _local(module, name, parameter)[start : start + rows]

        yield Entry(name=whole_name, shape=shape, dtype=parameter.dtype, read=read, part=part)
        start += rows


def _own_rows(module: Any) -> tuple[int, int]:
    """The first row of the vocabulary that this rank has, and how many it has, without those that are there as padding."""
    if _ranks(module) == 1:
        return 0, int(module.org_vocab_size)
    own = module.shard_indices
    return int(own.org_vocab_start_index), int(own.org_vocab_end_index - own.org_vocab_start_index)


def _local(module: Any, name: str, parameter: Any) -> torch.Tensor:
    """What this rank has of it, as the layer computes with it."""
    packed = getattr(module, "cpu_linear", None)
    if name != "weight" or packed is None:
        return cast(torch.Tensor, parameter.detach())
    columns = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    identity = torch.eye(columns, dtype=parameter.dtype)
    return cast(torch.Tensor, packed(identity, parameter, None)).t().contiguous()


def _ranks(module: Any) -> int:
    return int(getattr(module, "tp_size", 1))


def _gathered(local: torch.Tensor, dim: int, *, one: bool = False) -> torch.Tensor:
    """The parts of all tensor-parallel ranks, side by side."""
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

    if one or get_tensor_model_parallel_world_size() == 1:
        return local
    return cast(torch.Tensor, tensor_model_parallel_all_gather(local.contiguous(), dim))
