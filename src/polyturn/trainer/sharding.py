"""Cuts a model into shards, one a rank, that come together layer by layer while they compute (PyTorch's FSDP2).

Each decoder layer is a unit, and what is left (embeddings, last norm, head) is one more. A unit's weights are gathered before
it runs and given back after it. With float32 masters the shards themselves are float32 and are gathered as the model's own
type: the masters need no copy beside them. Gradients are added up and summed in float32, also those of bfloat16 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils._pytree import tree_map_only

from polyturn.trainer.gathering import whole_tensors
from polyturn.trainer.layers import decoder_layers

Result = TypeVar("Result")
_FORWARD, _TYPE = "polyturn_forward", "polyturn_type"


def shard(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    masters: bool = False,
    exact: Mapping[str, Tensor] | None = None,
    cut: Callable[[torch.nn.Module, str], None] | None = None,
) -> None:
    """Cut `model` over `mesh`, of one dimension, or of two where several copies are each cut over the second.

    Whole weights may lie on the CPU: each unit is brought to the mesh's device when it is cut. With `masters` the shards of
    trained parameters are float32, from `exact` where it is known. `cut` is called with each layer and its name before.
    All ranks call it with equal weights. Raises ModelError.
    """
    own = next(model.parameters()).dtype
    if masters:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = (exact or {}).get(name, parameter.data).float()
    half = own.itemsize == 2
    policy = MixedPrecisionPolicy(
        param_dtype=own if masters else None,
        reduce_dtype=torch.float32 if half else None,
        cast_forward_inputs=False,
    )
    names = {module: name for name, module in model.named_modules()}
    for layer in decoder_layers(model):
        if cut is not None:
            cut(layer, names[layer])
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # A loss is a sum over all ranks' tokens, not a mean over ranks.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    setattr(model, _TYPE, own)
    setattr(model, _FORWARD, _run)
    register_fsdp_forward_method(model, _FORWARD)


def as_forward(model: torch.nn.Module, work: Callable[[], Result]) -> Result:
    """`work()`, which may use any part of `model`: of a sharded one it counts as its forward pass, a collective of all ranks.

    What it returns must hold the tensors that gradients come back to.
    """
    run: Callable[[Callable[[], Result]], Result] | None = getattr(model, _FORWARD, None)
    if run is None:
        return work()
    result = run(work)
    if isinstance(model, FSDPModule) and not torch.is_grad_enabled():
        model.reshard()  # no backward pass does it, and whole weights must not outlive an optimizer step
    return result


def run_by(model: torch.nn.Module, run: Callable[[Callable[[], Any]], Any]) -> None:
    """Have `as_forward` hand what uses `model` to `run`."""
    object.__setattr__(model, _FORWARD, run)  # a module that runs another must not become a part of it


def computes_in(model: torch.nn.Module) -> torch.dtype:
    """The type of the weights that compute, also where their shards are masters of another."""
    found: torch.dtype = getattr(model, _TYPE, None) or next(model.parameters()).dtype
    return found


def rows_of(weight: Any) -> int:
    """Rows of a whole weight; DeepSpeed's are empty between two passes, and remember their shape."""
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def gather(
    model: torch.nn.Module,
    names: Sequence[str],
    dtype: torch.dtype | None = None,
    *,
    shard_of: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> dict[str, Tensor]:
    """The whole tensors of the model's state with these names; complete when it returns. A collective of all ranks.

    What was cut comes as `dtype` where one is given. What is one parameter under two names is gathered once, and is one tensor
    again. `shard_of` knows the parts of a model that holds them as plain tensors.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # whole weights that a pass left behind are those of before the last step
    held = {name: _attribute(model, name) for name in names}
    owners: dict[int, str] = {}
    for name, tensor in held.items():
        owners.setdefault(id(tensor), name)
    whole = whole_tensors({name: shard_of(name, held[name]) for name in owners.values()}, dtype)
    return {name: whole[owners[id(tensor)]].detach() for name, tensor in held.items()}


def _attribute(model: torch.nn.Module, name: str) -> Tensor:
    """The parameter or buffer of this name. A model's `state_dict` has all of them, and takes milliseconds."""
    above, _, own = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(above), own)
    return found


def same_parameters(model: torch.nn.Module) -> dict[str, str]:
    """The first name of each parameter, by name: tied ones have several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.named_parameters(remove_duplicate=False)}


def _run(work: Callable[[], Any]) -> Any:
    """What FSDP takes for the forward pass. It hangs the way back on the tensors that come out, and distrusts views."""
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor._is_view() else tensor, work())
