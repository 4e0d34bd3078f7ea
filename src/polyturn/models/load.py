"""Loads a policy from its folder, and exports one."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from polyturn.errors import ConfigError, ModelError
from polyturn.models.adapters import has_adapters, load_adapters, merge_adapters, save_adapters

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)

_SHARD = "5GB"
"""Most that one file of weights holds."""


def load_model(
    folder: Path, *, dtype: str, attention: str, device: torch.device, quantize: Literal["8bit", "4bit"] | None = None
) -> torch.nn.Module:
    """The causal language model of `folder`, on `device`; with `quantize` its decoder's linear layers are of so few bits.

    `attention` is the recipe's `model.attention`.

    Raises:
        ModelError: transformers can't load it, or its files lack weights, which transformers would make up at random.
        ConfigError: what is asked for runs on GPUs only.
    """
    if attention == "flash_attention_2" and device.type != "cuda":
        raise ConfigError(f"model.attention=flash_attention_2 does not run on {device.type}; use model.attention=auto")
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if attention in ("sdpa", "eager", "flash_attention_2"):
        # What is not named is transformers' own choice: SDPA, or eager attention where a model can't have it.
        options["attn_implementation"] = attention
    if quantize is not None:
        # Weights that are quantized on the way in never lie on the device whole.
        options |= {"quantization_config": quantization(quantize, getattr(torch, dtype)), "device_map": {"": device}}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    except Exception as error:
        raise ModelError(f"transformers could not load {folder}: {type(error).__name__}: {error}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"the files of {folder} lack {len(missing)} weights of a {type(model).__name__}, first {missing[0]}; fetch the "
            "model again, or name one that was saved whole"
        )
    if quantize is not None:
        return differentiable(model)
    moved: torch.nn.Module = model.to(device)
    return moved


def stores_float32(folder: Path) -> bool:
    """Whether the weights in the files of `folder` are float32; False where that can't be seen."""
    for path in sorted(folder.glob("*.safetensors"))[:1]:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"F32"}
    return False


@torch.no_grad()
def round_weights(model: torch.nn.Module, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Round the parameters of a float32 model to `dtype`, and return what they were, by name.

    Buffers stay as they are: those of rotary positions must be float32 in a bfloat16 model too.
    """
    exact = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return exact


def quantization(bits: Literal["8bit", "4bit"], dtype: torch.dtype) -> Any:
    """How bitsandbytes holds the weights of linear layers, for products in `dtype`."""
    from transformers import BitsAndBytesConfig

    if bits == "8bit":
        # It would say at every product that activations are rounded from float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        # The threshold would take columns out of the product by what happens to share a batch, so that the samples of a row,
        # and engine and trainer, would see different weights.
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def differentiable(model: torch.nn.Module) -> torch.nn.Module:
    """Keep the 4-bit layers of `model` from packing their weights for inference, which some CPUs do and gradients can't pass.

    They take evaluation mode for a sign that nothing is trained; here it only says that there is no dropout.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 - no type knows it
    return model


def export_model(
    model: Any,
    source: Path,
    target: Path,
    *,
    chat_template: Path | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write an ordinary transformers folder: weights and config of `model`, tokenizer and chat template of `source`.

    `state` has the tensors where `model` holds shards of them; without it they are its own.

    Of a model with adapters these alone are written, as PEFT does; `adapter_config.json` names their base.

    A `chat_template` that the policy was trained with instead of its own takes that one's place.
    """
    target.mkdir(parents=True, exist_ok=True)
    if has_adapters(model):
        save_adapters(model, target, state)
    else:
        whole = {} if state is None else {"state_dict": dict(state)}
        if not torch.cuda.is_available():
            # On its way transformers imports DeepSpeed where that is installed, which says aloud that it finds no GPU.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        model.save_pretrained(target, safe_serialization=True, max_shard_size=_SHARD, **whole)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file() and source != target:
            shutil.copyfile(source / name, target / name)
    if chat_template is not None:
        (target / "chat_template.json").unlink(missing_ok=True)
        shutil.copyfile(chat_template, target / "chat_template.jinja")


def merge_folder(adapters: Path, base: Path, target: Path, *, dtype: str = "bfloat16") -> None:
    """Write the ordinary folder of the model in `base` with the adapters in `adapters` added to its weights.

    Raises ModelError where they don't fit.
    """
    model = load_model(base, dtype=dtype, attention="sdpa", device=torch.device("cpu"))
    load_adapters(model, adapters, base=str(base))
    export_model(merge_adapters(model), adapters if (adapters / "tokenizer.json").is_file() else base, target)
