"""A recipe as the command line and the environment of a vLLM server. Pure: no torch, no vLLM, no files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyturn.config.schema import Recipe
from polyturn.engine.http import LOGPROBS_MODE
from polyturn.engine.vllm_install import RANGE, VllmInstall, find_vllm
from polyturn.errors import ConfigError
from polyturn.weight_sync.labels import BACKEND, EXTENSION, PLAIN, WEIGHT_LABEL

GUARD = "polyturn.engine.vllm_guard.Guard"
SERVED_NAME = "policy"
"""What a server that a run starts calls its model."""

_OUR_KEYS = {
    "host": "engine.host",
    "port": "engine.port",
    "model": "model.path",
    "dtype": "engine.dtype",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_batch_size",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
}
"""Arguments that a key of the recipe sets."""
_OURS = (
    "served_model_name",
    "skip_tokenizer_init",
    "logprobs_mode",
    "worker_extension_cls",
    "weight_transfer_config",
    "enable_scale_out",
    "middleware",
    "generation_config",
    "api_key",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
)
"""Arguments that the rest of Polyturn relies on."""
_FIXED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_SERVER_DEV_MODE": "1"}


def server_arguments(recipe: Recipe, model: Path, *, port: int, on_gpu: bool, vllm: VllmInstall) -> list[str]:
    """What follows `python -m vllm.entrypoints.openai.api_server`. Raises ConfigError for `engine.extra_args` that can't be."""
    engine = recipe.engine
    refuse_own_arguments(engine.extra_args)
    given: dict[str, Any] = {
        "model": str(model),
        "served_model_name": SERVED_NAME,
        "host": engine.host,
        "port": port,
        "skip_tokenizer_init": True,  # ids in, ids out: text is the driver's business
        "generation_config": "vllm",  # nothing about sampling comes from the model's folder
        "dtype": _dtype(recipe),
        "max_model_len": engine.max_model_len or recipe.rollout.max_trajectory_tokens,
        "max_num_seqs": engine.max_batch_size,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "logprobs_mode": LOGPROBS_MODE,  # under the temperature that was asked for
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "middleware": GUARD,
        "seed": recipe.run.seed,
        "disable_uvicorn_access_log": True,  # a line a request would bury what matters
    }
    if vllm.needs_scale_out_flag:
        given["enable_scale_out"] = True
    if on_gpu:
        shared = set(recipe.trainer.devices or ()) & set(engine.devices or ())
        given["gpu_memory_utilization"] = engine.gpu_memory_utilization or (0.3 if shared else 0.9)
    else:
        if recipe.weight_sync.mode == "single_copy":
            given["quantization"] = PLAIN  # layers that pack their weights would compute with copies of them
        given["enforce_eager"] = True  # compiling takes longer on a CPU than it saves
        # vLLM takes a draw back when it has a part of a prompt only, and on a CPU ends where a request has a seed of its own.
        given["enable_chunked_prefill"] = False
    lora = recipe.model.lora
    if lora is not None:
        # Two at a time: requests that began with the old one may still be under way when the new one comes.
        given |= {"enable_lora": True, "max_lora_rank": _lora_rank(lora.rank), "max_loras": 2}
    return [word for name, value in (given | engine.extra_args).items() for word in _words(name, value)]


def server_environment(recipe: Recipe, environ: Mapping[str, str], *, on_gpu: bool, label: str) -> dict[str, str]:
    """Variables on top of `environ` for a server whose weights are called `label`.

    Raises ConfigError for a variable that is set to what can't be.
    """
    for name, value in _FIXED.items():
        if environ.get(name, value) != value:
            why = (
                "workers that are forked inherit locks and CUDA state"
                if "METHOD" in name
                else "weights are pushed through its routes"
            )
            raise ConfigError(f"{name}={environ[name]} in the environment, and Polyturn needs {value}: {why}; unset it")
    parts = recipe.engine.tensor_parallel_size
    usual = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder here
        **exactness(_dtype(recipe)),
        # A share of a GPU says nothing about a CPU's memory, of which vLLM would take that share.
        **({} if on_gpu else {"VLLM_CPU_KVCACHE_SPACE": "1"}),
        # vLLM gives each part of a server a memory node of its own, and most machines have one.
        **({} if on_gpu or parts == 1 else {"VLLM_CPU_OMP_THREADS_BIND": "|".join(_cores_of_parts(parts))}),
    }
    chosen = {name: environ.get(name, value) for name, value in usual.items()} | _FIXED | {WEIGHT_LABEL: label}
    if recipe.model.lora is not None:
        chosen["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    return chosen


def exactness(dtype: str) -> dict[str, str]:
    """Variables that hold vLLM to the type it was given.

    Its attention kernels for float32 are Triton's, which by itself multiplies as TF32, with 10 bits instead of 23.
    """
    return {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {}


def _dtype(recipe: Recipe) -> str:
    return recipe.model.dtype if recipe.engine.dtype == "auto" else recipe.engine.dtype


def _cores_of_parts(parts: int) -> list[str]:
    """The cores of this process, dealt out to the parts of a server; parts that get none have the same as others."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return [",".join(map(str, cores[part::parts] or cores[part % len(cores) :][:1])) for part in range(parts)]


def refuse_arguments(recipe: Recipe, environ: Mapping[str, str], *, on_gpu: bool, elsewhere: bool = False) -> None:
    """Raise UserError for what would keep a server from starting: no vLLM, or arguments and variables that can't be.

    A run that will be on another machine needs no vLLM on this one.
    """
    server_environment(recipe, environ, on_gpu=on_gpu, label="")
    vllm = VllmInstall(version=RANGE, needs_scale_out_flag=True) if elsewhere else find_vllm()
    server_arguments(recipe, Path(), port=1, on_gpu=on_gpu, vllm=vllm)


def refuse_own_arguments(extra: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments of `engine.extra_args` that are set elsewhere, or must be what they are."""
    for name in extra:
        plain = name.lstrip("-").replace("-", "_")
        if plain != name:
            raise ConfigError(f"engine.extra_args.{name}: write the name as vLLM's Python does, {plain}")
        if name in _OUR_KEYS:
            raise ConfigError(f"engine.extra_args.{name}: set {_OUR_KEYS[name]} instead; a fact stands in one place")
        if name in _OURS:
            raise ConfigError(f"engine.extra_args.{name}: Polyturn sets it, and relies on it; remove it")


def _words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{name.replace('_', '-')}"]
    if isinstance(value, dict | list | tuple):
        return [flag, json.dumps(value)]
    return [flag, str(value)]


def _lora_rank(rank: int) -> int:
    """The least rank that vLLM has room for which holds `rank`."""
    return next((known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)
