"""Low-rank adapters: put beside a model's linear layers, switched off, exported as PEFT does, merged.

PEFT's layers take the place of the linear ones inside the model, which stays what it was otherwise: the same class, the same
way to call it, its head and its layers where they were. Adapters have the type of the model's weights, so that its layers run
in one type and keep one copy of what comes in; small updates survive through `trainer.master_weights`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from polyturn.errors import ModelError, nearest

ADAPTER = "default"
"""What PEFT calls the only adapter of a model."""
WEIGHTS = "adapter_model.safetensors"


def add_adapters(model: Any, *, rank: int, alpha: float, targets: Sequence[str] | None, base: str, seed: int) -> None:
    """Freeze `model` and put trainable adapters beside linear layers of its decoder, which change nothing yet.

    `targets` are names of layers within a decoder layer, None for all. `base` is what an export says it belongs to. The same
    seed gives the same adapters, so that all ranks start as one. Raises ModelError for a target that is no such layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = _targets(model, targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=names, bias="none", task_type="CAUSAL_LM")
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
    name_base(model, base)


def load_adapters(model: Any, folder: Path, *, base: str) -> None:
    """Put the adapters in `folder` beside the layers of their base `model`, frozen. Raises ModelError where they don't fit."""
    from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict
    from safetensors.torch import load_file

    try:
        config = PeftConfig.from_pretrained(str(folder))
        inject_adapter_in_model(config, model, ADAPTER)
        loaded = set_peft_model_state_dict(model, load_file(folder / WEIGHTS), ADAPTER)
        missing = [name for name in loaded.missing_keys if ".lora_" in name] + list(loaded.unexpected_keys)
        if missing:
            raise ValueError(f"{len(missing)} tensors have no counterpart, first {missing[0]}")
    except Exception as error:
        raise ModelError(
            f"the adapters in {folder} don't fit their base model {base}: {type(error).__name__}: {error}"
        ) from error
    model.requires_grad_(False)
    for parameter in adapter_parameters(model):
        parameter.data = parameter.data.to(model.dtype)
    name_base(model, base)


def save_adapters(model: Any, folder: Path, state: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the adapters of `model` as PEFT does: `peft.PeftModel.from_pretrained` reads them, and `load_adapters`.

    `state` has their tensors where the model holds shards.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    tensors = get_peft_model_state_dict(model, state_dict=state, adapter_name=ADAPTER, save_embedding_layers=False)
    named = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[ADAPTER])
    config.inference_mode = True  # whoever loads them decides whether they are trained
    config.save_pretrained(str(folder))


def has_adapters(model: Any) -> bool:
    """Whether there are adapters in `model`."""
    return hasattr(model, "peft_config")


def name_base(model: Any, base: str) -> None:
    """Say which model the adapters belong to, by a name that finds it from anywhere."""
    model.peft_config[ADAPTER].base_model_name_or_path = base


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Within it `model` is its base. Only one thread may use the model meanwhile."""
    layers = _adapted(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_adapters(model: Any) -> Any:
    """The ordinary model that `model` with its adapters is; `model` itself is used up."""
    places = {id(module): name for name, module in model.named_modules()}
    for layer in _adapted(model):
        layer.merge()
        above, _, own = places[id(layer)].rpartition(".")
        setattr(model.get_submodule(above), own, layer.get_base_layer())
    del model.peft_config
    return model


def adapter_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Those of the adapters, whether trained or not."""
    return [parameter for name, parameter in model.named_parameters() if ".lora_" in name]


def pushed_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that training changes, by name: all of the model's state, or the trained ones where others are frozen."""
    state: Mapping[str, torch.Tensor] = model.state_dict()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if len(trained) in (0, len(list(model.named_parameters()))):  # a copy that only samples may be frozen as a whole
        return dict(state)
    return {name: tensor for name, tensor in state.items() if name in trained}


def frozen_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The other tensors of the model's state, which stay what they are."""
    pushed = pushed_weights(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in pushed}


def copy_for_sampling(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that training does not change, with the frozen weights shared: nothing ever writes to those."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    # An 8-bit layer keeps its weights in a second place too.
    states = [module.state for module in model.modules() if hasattr(module, "init_8bit_state")]
    return copy.deepcopy(model, shared | {id(state): state for state in states})


def _adapted(model: torch.nn.Module) -> list[Any]:
    """The layers with adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _targets(model: Any, asked: Sequence[str] | None) -> list[str]:
    """What PEFT is to look for, as short as it can be said. Raises ModelError."""
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    chosen = _linear_layers(model, asked)
    short = {_last(name) for name in chosen}
    return sorted(short if {name for name in linear if _last(name) in short} == chosen else chosen)


def _linear_layers(model: Any, asked: Sequence[str] | None) -> set[str]:
    """Full names of the linear layers that get adapters: those within a decoder layer. Raises ModelError."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    inside: dict[str, set[str]] = {}
    for prefix, layer in model.named_modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for name, module in layer.named_modules():
                if isinstance(module, torch.nn.Linear):
                    inside.setdefault(name, set()).add(f"{prefix}.{name}")
    if not inside:
        raise ModelError(f"{type(model).__name__} has no linear layers in decoder layers, so there is no place for adapters")
    if asked is None:
        return set().union(*inside.values())
    chosen: set[str] = set()
    for target in asked:
        found = [names for name, names in inside.items() if f".{name}".endswith(f".{target}")]
        if not found:
            raise ModelError(
                f"model.lora.targets: {target} is no linear layer in the decoder of a {type(model).__name__}; "
                f"{nearest(target, map(_last, inside))}"
            )
        chosen.update(*found)
    return chosen


def _last(name: str) -> str:
    return name.rpartition(".")[2]
