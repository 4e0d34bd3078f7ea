"""Loads a policy from a folder or a hub id, and exports one."""

from __future__ import annotations

import json
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


def model_folder(path: str) -> Path:
    """The local folder of `path`: itself when it is one, else the hub id's folder in the local cache or from the hub.

    Raises:
        ModelError: neither a folder with a config.json nor an id the hub can give.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path={path} has no config.json; give a folder that transformers' save_pretrained wrote")
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(f"model.path={path} does not exist; give a folder, a hub id such as owner/name, or a builtin: model")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.safetensors", "*.model"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns, local_files_only=True))
    except Exception:
        pass  # not in the cache yet: ask the hub
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:
        raise ModelError(
            f"model.path={path} is neither a folder here nor in the local hub cache, and the hub did not give it: {error}"
        ) from error


def load_model(folder: Path, *, dtype: str, attention: str, device: torch.device) -> torch.nn.Module:
    """The causal language model of `folder`, on `device`. Raises ModelError when transformers can't load it."""
    from transformers import AutoModelForCausalLM

    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=attention, local_files_only=True
        )
    except Exception as error:
        raise ModelError(f"transformers could not load {folder}: {type(error).__name__}: {error}") from error
    return model.to(device)


def export_model(model: Any, source: Path, target: Path) -> None:
    """Write an ordinary transformers folder: weights and config of `model`, tokenizer and chat template of `source`."""
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target, safe_serialization=True)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file() and source != target:
            shutil.copyfile(source / name, target / name)


def max_positions(folder: Path) -> int | None:
    """Longest context the model's config allows, None where it doesn't say."""
    config = json.loads((folder / "config.json").read_text())
    value = config.get("max_position_embeddings")
    return int(value) if value else None
