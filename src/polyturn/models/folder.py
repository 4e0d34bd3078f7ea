"""Finds a model's folder and reads what its config says. Needs no torch, so that a wrong one is refused before it is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyturn.errors import ModelError, nearest

TINY = "builtin:tiny"
SMOLLM2 = "builtin:smollm2"
TINY_POSITIONS = 2048
BUILTIN_POSITIONS: Mapping[str, int] = {TINY: TINY_POSITIONS, SMOLLM2: 8192}
"""The models that come with Polyturn, and their longest contexts."""


def local_folder(path: str) -> Path | None:
    """The folder that `path` names; None for a hub id.

    Raises:
        ModelError: a folder that isn't there, or holds no model; a `builtin:` name that is none.
    """
    if path.startswith("builtin:"):
        raise ModelError(f"model.path={path} is no model that comes with Polyturn; {nearest(path, BUILTIN_POSITIONS)}")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file() and not is_adapter(folder):
            raise ModelError(f"model.path={path} has no config.json; give a folder that transformers' save_pretrained wrote")
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1 or not all(path.split("/")):
        known = " or ".join(BUILTIN_POSITIONS)
        raise ModelError(f"model.path={path} does not exist; give a folder, a hub id such as owner/name, or {known}")
    return None


def model_folder(path: str) -> Path:
    """The local folder of `path`: itself when it is one, else the hub id's folder in the local cache or from the hub.

    Raises:
        ModelError: neither a folder with a config.json nor an id the hub can give.
    """
    folder = local_folder(path)
    if folder is not None:
        return folder
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


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds adapters, which need their base model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def adapter_base(folder: Path) -> str:
    """The model that the adapters in `folder` belong to, as `model.path` would name it. Raises ModelError."""
    path = folder / "adapter_config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read ({error}); export the adapters again") from error
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str) or not base:
        raise ModelError(f"{path} does not say which model its adapters belong to; set base_model_name_or_path in it")
    if base not in BUILTIN_POSITIONS:
        found = local_folder(base)
        if found is not None and is_adapter(found):
            raise ModelError(f"{path} names {base}, adapters themselves; set base_model_name_or_path to a whole model")
    return base


def base_name(path: str) -> str:
    """The name of a model by which adapters find it from anywhere: a folder's is absolute."""
    folder = None if path in BUILTIN_POSITIONS else local_folder(path)
    return path if folder is None else str(folder.resolve())


def max_positions(folder: Path) -> int | None:
    """Longest context the model's config allows, None where it doesn't say. Raises ModelError for a config that isn't one."""
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} can't be read ({error}); fetch the model again") from error
    value = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return int(value) if value else None
