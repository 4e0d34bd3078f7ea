"""Finds a model's folder and reads what its config says. Needs no torch, so that a wrong one is refused before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polyturn.errors import ModelError

TINY = "builtin:tiny"
TINY_POSITIONS = 2048
"""Longest context of `builtin:tiny`."""


def local_folder(path: str) -> Path | None:
    """The folder that `path` names; None for a hub id.

    Raises:
        ModelError: a folder that isn't there, or holds no model.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path={path} has no config.json; give a folder that transformers' save_pretrained wrote")
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1 or not all(path.split("/")):
        raise ModelError(f"model.path={path} does not exist; give a folder, a hub id such as owner/name, or {TINY}")
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


def max_positions(folder: Path) -> int | None:
    """Longest context the model's config allows, None where it doesn't say. Raises ModelError for a config that isn't one."""
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} can't be read ({error}); fetch the model again") from error
    value = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return int(value) if value else None
