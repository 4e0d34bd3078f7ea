"""Loads a policy from its folder, and exports one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from polyturn.errors import ModelError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def load_model(folder: Path, *, dtype: str, attention: str, device: torch.device) -> torch.nn.Module:
    """The causal language model of `folder`, on `device`; `attention` is the recipe's `model.attention`.

    Raises:
        ModelError: transformers can't load it, or its files lack weights, which transformers would make up at random.
    """
    from transformers import AutoModelForCausalLM

    # What is not named is transformers' own choice: SDPA, or eager attention where a model can't have it.
    named = {"attn_implementation": attention} if attention in ("sdpa", "eager", "flash_attention_2") else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True, **named
        )
    except Exception as error:
        raise ModelError(f"transformers could not load {folder}: {type(error).__name__}: {error}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"the files of {folder} lack {len(missing)} weights of a {type(model).__name__}, first {missing[0]}; fetch the "
            "model again, or name one that was saved whole"
        )
    moved: torch.nn.Module = model.to(device)
    return moved


def export_model(model: Any, source: Path, target: Path, *, chat_template: Path | None = None) -> None:
    """Write an ordinary transformers folder: weights and config of `model`, tokenizer and chat template of `source`.

    A `chat_template` that the policy was trained with instead of its own takes that one's place.
    """
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target, safe_serialization=True)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file() and source != target:
            shutil.copyfile(source / name, target / name)
    if chat_template is not None:
        (target / "chat_template.json").unlink(missing_ok=True)
        shutil.copyfile(chat_template, target / "chat_template.jinja")
