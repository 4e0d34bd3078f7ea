"""What follows from where the engine is: vLLM's share of memory, its longest context, and how weights reach it."""

from __future__ import annotations

from typing import Any

from polyturn.config.schema import Recipe, with_values
from polyturn.errors import ConfigError

_OWN_GPU, _SHARED_GPU = 0.9, 0.3
_VLLM_KEYS = (
    "urls", "tensor_parallel_size", "device", "gpu_memory_utilization", "max_model_len", "dtype", "sleep", "extra_args",
)  # fmt: skip
"""Settings that only vLLM has."""
_SAVE_S = 60.0
"""For the servers to find the weights on the disk, beside the time of a start."""


def vllm_settings(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str]) -> Recipe:
    """Share of memory and longest context of vLLM; settings of vLLM with another engine are refused."""
    engine = recipe.engine
    if not engine.kind.startswith("vllm"):
        usual = type(engine)()
        for key in _VLLM_KEYS:
            if getattr(engine, key) != getattr(usual, key):
                raise ConfigError(
                    f"engine.{key}={getattr(engine, key)} is a setting of vLLM, and engine.kind={engine.kind}; remove it, or "
                    "use engine.kind=vllm or vllm_server"
                )
        return recipe
    found: dict[str, Any] = {"sleep": _sleep(recipe)}
    if engine.sleep == "auto":
        reasons["engine.sleep"] = "no plan of this machine's GPUs asks for it"
    if engine.gpu_memory_utilization is None:
        both = set(engine.devices or ()) & set(recipe.trainer.devices or ())
        beside = engine.device is None if engine.kind == "vllm" else bool(both)
        found["gpu_memory_utilization"] = _SHARED_GPU if beside else _OWN_GPU
        reasons["engine.gpu_memory_utilization"] = "the trainer is on the same GPU" if beside else "the GPU is its own"
    longest = recipe.rollout.max_trajectory_tokens
    if engine.max_model_len is None:
        found["max_model_len"] = longest
        reasons["engine.max_model_len"] = f"a whole trajectory, of rollout.max_trajectory_tokens={longest}"
    elif engine.max_model_len < longest:
        raise ConfigError(
            f"engine.max_model_len={engine.max_model_len}: vLLM must hold a whole trajectory, of "
            f"rollout.max_trajectory_tokens={longest}; set engine.max_model_len={longest}, or "
            f"rollout.max_trajectory_tokens={engine.max_model_len}"
        )
    return with_values(recipe, "engine", **found)


def _sleep(recipe: Recipe) -> str:
    """`on` or `off`. Where `auto` comes to `on`, the plan of the machine's GPUs has said so before. Raises ConfigError."""
    engine = recipe.engine
    if engine.sleep != "on":
        return "off"
    why = None
    if engine.kind != "vllm":
        why = f"engine.kind={engine.kind} computes in processes of its own, which don't know when the trainer needs memory"
    elif engine.device is not None:
        why = f"the engine has a GPU of its own, engine.device={engine.device}, whose memory nobody else needs"
    if why is not None:
        raise ConfigError(f"engine.sleep=on: {why}; remove it")
    return "on"


def weight_sync_mode(recipe: Recipe, num_train_tasks: int | None, reasons: dict[str, str]) -> Recipe:
    """How the weights reach the engine follows from where it is; what can't reach it is refused."""
    kind, mode = recipe.engine.kind, recipe.weight_sync.mode
    if kind == "vllm":
        return _vllm_sync(recipe, reasons)
    if kind == "vllm_server":
        return _vllm_server_sync(recipe, reasons)
    fits, where = ("in_process", "in the driver's process") if kind == "hf" else ("nccl", "in processes of its own")
    if mode == "auto":
        reasons["weight_sync.mode"] = f"the engine is {where} (engine.kind={kind})"
        return with_values(recipe, "weight_sync", mode=fits)
    if mode != fits:
        raise ConfigError(
            f"weight_sync.mode={mode} can't reach an engine that is {where} (engine.kind={kind}); use {fits}, or auto"
        )
    return recipe


def _vllm_sync(recipe: Recipe, reasons: dict[str, str]) -> Recipe:
    """How weights reach vLLM in the driver's process: they are the trainer's own, or a copy."""
    engine, mode = recipe.engine, recipe.weight_sync.mode
    apart = None
    if engine.device is not None:
        apart = f"the engine has a GPU of its own, engine.device={engine.device}"
    elif engine.dtype not in ("auto", recipe.model.dtype):
        apart = f"the engine has weights of another type, engine.dtype={engine.dtype}"
    elif recipe.weight_sync.every_steps > 1:
        apart = f"with one copy every step is a push, and weight_sync.every_steps={recipe.weight_sync.every_steps}"
    if mode == "auto":
        reasons["weight_sync.mode"] = apart or "engine and trainer are in one process, on one GPU (engine.kind=vllm)"
        return with_values(recipe, "weight_sync", mode="in_process" if apart else "single_copy")
    if mode not in ("in_process", "single_copy") or (mode == "single_copy" and apart):
        why = apart if mode == "single_copy" else "the engine is in the driver's process"
        raise ConfigError(
            f"weight_sync.mode={mode} with engine.kind=vllm: {why}; use {'' if apart else 'single_copy, '}in_process or auto"
        )
    return recipe


def _vllm_server_sync(recipe: Recipe, reasons: dict[str, str]) -> Recipe:
    """How weights reach vLLM servers: adapters as files; whole models as one copy, over a process group, or by a restart."""
    sync, adapters, beside = recipe.weight_sync, recipe.model.lora is not None, _shared_gpu(recipe)
    mode: str = sync.mode
    if mode == "auto":
        mode, reasons["weight_sync.mode"] = _fitting(recipe, beside)
    if mode not in (("lora",) if adapters else ("nccl", "restart", "single_copy")):
        whose = "adapters are trained (model.lora); use lora" if adapters else "all weights are trained; use nccl, restart"
        if not adapters and no_single_copy(recipe) is None:
            whose += ", single_copy"
        raise ConfigError(f"weight_sync.mode={mode} with engine.kind=vllm_server: {whose} or auto")
    if mode == "restart" and recipe.engine.urls:
        raise ConfigError(
            "weight_sync.mode=restart: only servers that the run started are restarted; use nccl, or no engine.urls"
        )
    if mode == "single_copy" and (why := no_single_copy(recipe)):
        raise ConfigError(f"weight_sync.mode=single_copy with engine.kind=vllm_server: {why}")
    limit_s = sync.deadline_s
    if mode == "restart" and limit_s < recipe.engine.start_deadline_s + _SAVE_S:
        limit_s = recipe.engine.start_deadline_s + _SAVE_S
        reasons["weight_sync.deadline_s"] = (
            f"a push is a start (engine.start_deadline_s), and {_SAVE_S:g} s to save the weights"
        )
    return with_values(recipe, "weight_sync", mode=mode, deadline_s=limit_s)


def _fitting(recipe: Recipe, beside: int | None) -> tuple[str, str]:
    """The mode for servers, and why. `beside` is a GPU that they share with the trainer."""
    where = "the engine is in processes of its own (engine.kind=vllm_server), and"
    if recipe.model.lora is not None:
        return "lora", f"{where} adapters are small and go as files"
    if beside is None or recipe.engine.urls:
        return "nccl", f"{where} they go over a process group, NCCL between GPUs, else gloo"
    there = f"server and trainer are two processes on GPU {beside}, which NCCL can't connect"
    why = no_single_copy(recipe)
    if why is None:
        return "single_copy", f"{there}, so they hold one copy of the weights"
    sender = (recipe.trainer.devices or (beside,))[0]
    if sender not in (recipe.engine.devices or ()):
        return "nccl", f"{where} they go over a process group from rank 0, on GPU {sender}, which it shares with no server"
    return "restart", f"{there}, and one copy of the weights can't be had: {why}"


def _shared_gpu(recipe: Recipe) -> int | None:
    """The first GPU that a recipe gives to trainer and servers."""
    return min(set(recipe.trainer.devices or ()) & set(recipe.engine.devices or ()), default=None)


def no_single_copy(recipe: Recipe) -> str | None:
    """Why the trainer's weights can't be those of a vLLM server, and what to do instead; None where they can."""
    engine, trainer, every = recipe.engine, recipe.trainer, recipe.weight_sync.every_steps
    if engine.urls:
        return "engine.urls are servers of others, which keep their memory to themselves; use nccl"
    if trainer.parallel not in ("auto", "single", "ddp", "zero1"):
        return (
            f"trainer.parallel={trainer.parallel} cuts every weight into shards of its own, which can't be views of a server's "
            "tensors; use nccl, or trainer.parallel=zero1, which cuts the optimizer's state alone"
        )
    if trainer.tensor_ranks != engine.tensor_parallel_size:
        return (
            "rank and server must have the same of every layer, and they are cut over "
            f"trainer.tensor_ranks={trainer.tensor_ranks} and engine.tensor_parallel_size={engine.tensor_parallel_size}; use "
            "nccl, or the same for both"
        )
    workers = engine.num_servers * engine.tensor_parallel_size
    if trainer.num_ranks != workers:
        servers = "engine.num_servers" + (" x engine.tensor_parallel_size" if engine.tensor_parallel_size > 1 else "")
        return (
            f"every rank shares with a server of its own, or with a part of one, and there are "
            f"trainer.num_ranks={trainer.num_ranks} and {servers}={workers}; use nccl, or as many of both"
        )
    if engine.dtype not in ("auto", recipe.model.dtype):
        return f"the engine has weights of another type, engine.dtype={engine.dtype}; use nccl, or engine.dtype=auto"
    if engine.extra_args.get("enable_sleep_mode"):
        return "engine.extra_args.enable_sleep_mode gives the weights back, and the trainer works on them; remove it"
    if every > 1:
        return f"with one copy every step is a push, and weight_sync.every_steps={every}; use 1, or another mode"
    return None
