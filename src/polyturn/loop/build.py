"""Puts a run together. The only place that names concrete engines and bridges."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from polyturn.config.schema import Recipe, filled
from polyturn.engine.base import Engine, Sleep
from polyturn.engine.hf import HfEngine
from polyturn.engine.http import HttpEngine
from polyturn.engine.vllm import VllmEngine
from polyturn.engine.vllm_core import VllmSettings
from polyturn.environments.base import Environment
from polyturn.errors import ConfigError, ModelError
from polyturn.loop.check import chat_template, refuse_short_context
from polyturn.loop.place import Place
from polyturn.loop.tiny import ensure_tiny
from polyturn.loop.vllm_parts import vllm_servers
from polyturn.models.adapters import add_adapters, copy_for_sampling, frozen_weights, has_adapters, load_adapters
from polyturn.models.folder import SMOLLM2, TINY, adapter_base, base_name, is_adapter, max_positions, model_folder
from polyturn.models.load import load_model, round_weights, stores_float32
from polyturn.models.smollm2 import ensure_smollm2
from polyturn.processes.threads import in_thread_within
from polyturn.rendering.renderer import Renderer
from polyturn.trainer.attention import use_attention, use_plain_attention
from polyturn.trainer.layers import plain_layers
from polyturn.trainer.ranks import Ranks
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.trainer import Trainer
from polyturn.weight_sync.base import WeightBridge
from polyturn.weight_sync.in_process import InProcessBridge
from polyturn.weight_sync.nccl import NcclBridge
from polyturn.weight_sync.single_copy import SingleCopyBridge

Say: TypeAlias = Callable[[str], None]


MAKE_MODEL_S = 900.0
"""How long the model of a package may take to be made: half a minute where nothing else runs."""


async def _smollm2(recipe: Recipe, environment: Environment, say: Say) -> Path:
    return await in_thread_within(MAKE_MODEL_S, f"making {SMOLLM2}", ensure_smollm2, say)


BUILTIN_MODELS: Mapping[str, Callable[[Recipe, Environment, Say], Awaitable[Path]]] = {
    TINY: ensure_tiny,
    SMOLLM2: _smollm2,
}
"""Who makes the folder of a model that comes with Polyturn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A loaded model with the folder that its tokenizer came from and the renderer that goes with it."""

    model: torch.nn.Module
    folder: Path
    renderer: Renderer
    exact: Mapping[str, torch.Tensor] | None = None
    """What the weights were before they were rounded, for a trainer to go on from; None where nothing was lost."""


def choose_device(name: str, key: str = "trainer.device") -> torch.device:
    """The device that `key` names; `auto` is a GPU where there is one, the rank's own of several ranks. Raises ConfigError."""
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        own = os.environ.get("LOCAL_RANK")  # torchrun's
        return torch.device("cuda" if own is None else f"cuda:{own}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{key}={name!r} is no device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"{key}={name} but this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu")
    return device


async def load_policy(
    recipe: Recipe, environment: Environment, say: Say, *, path: str | None = None, keep_exact: bool = False
) -> Policy:
    """Load `path`, or the recipe's model; a built-in one is made when the cache doesn't hold it.

    A folder of adapters is loaded with its base. `model.lora` is for training: see `policy_to_train`. With `keep_exact` the
    float32 weights of a folder are kept beside those of the recipe's type.

    Raises:
        ConfigError: a device that isn't there.
        ModelError: not loadable, not made for its tokenizer, or its context is shorter than `rollout.max_trajectory_tokens`.
    """
    device = choose_device(recipe.trainer.device)
    sharded = recipe.trainer.parallel in ("fsdp2", "deepspeed") or recipe.trainer.tensor_ranks > 1
    if recipe.trainer.threads is not None:
        torch.set_num_threads(recipe.trainer.threads)
    path = path or recipe.model.path
    folder = await policy_folder(recipe, environment, say, path)
    adapters = folder if is_adapter(folder) else None
    if adapters is not None:
        base = adapter_base(adapters)
        folder = await policy_folder(recipe, environment, say, base)
    refuse_short_context(recipe, path, max_positions(folder))
    tokenizer = adapters if adapters is not None and (adapters / "tokenizer.json").is_file() else folder
    renderer = Renderer.load(tokenizer, chat_template=chat_template(recipe))
    rounds = keep_exact and recipe.model.dtype != "float32" and stores_float32(folder)
    model = load_model(
        folder,
        dtype="float32" if rounds else recipe.model.dtype,
        attention=recipe.model.attention,
        # What will be cut is brought to its device unit by unit, so that no GPU ever holds the whole.
        device=torch.device("cpu") if sharded else device,
        quantize=recipe.model.quantize,
    )
    exact = round_weights(model, getattr(torch, recipe.model.dtype)) if rounds else None
    if adapters is not None:
        load_adapters(model, adapters, base=base)
    refuse_missing_rows(path, model, renderer.tokenizer.vocab_size)
    use_attention(model, recipe.model.attention, on_gpu=device.type == "cuda")
    return Policy(model=model, folder=tokenizer, renderer=renderer, exact=exact)


async def policy_folder(recipe: Recipe, environment: Environment, say: Say, path: str) -> Path:
    """The local folder of `path`; one of a model that comes with Polyturn is made when the cache doesn't hold it."""
    make = BUILTIN_MODELS.get(path)
    return model_folder(path) if make is None else await make(recipe, environment, say)


async def policy_to_train(recipe: Recipe, environment: Environment, say: Say, *, path: str | None = None) -> Policy:
    """`path`, or the recipe's model, with fresh adapters where `model.lora` asks for them.

    Raises what `load_policy` raises, and ModelError for a folder of adapters: training starts from a whole model.
    """
    path = path or recipe.model.path
    lora = recipe.model.lora
    keep_exact = lora is None and recipe.trainer.master_weights == "float32"
    policy = await load_policy(recipe, environment, say, path=path, keep_exact=keep_exact)
    if has_adapters(policy.model):
        raise ModelError(
            f"{path} holds adapters, and training starts from a whole model; merge them with their base first "
            "(docs/memory.md has the lines that do it)"
        )
    if lora is not None:
        add_adapters(
            policy.model,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=lora.targets,
            base=base_name(path),
            seed=recipe.run.seed,
        )
    return policy


def refuse_missing_rows(path: str, model: Any, vocab_size: int) -> None:
    """Raise ModelError when the tokenizer has ids that the model has no embedding for; more embeddings than ids are usual."""
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < vocab_size:
        raise ModelError(
            f"model.path={path} has {rows} embeddings but its tokenizer has ids up to {vocab_size - 1}; they belong to "
            "different models, or the embeddings were not resized"
        )


def build_engine(recipe: Recipe, model: torch.nn.Module, *, linger_s: float = 0.0) -> HfEngine:
    """The `hf` engine over `model`, which it owns from then on."""
    plain_layers(model)
    use_plain_attention(model)
    pad: Any = getattr(model.config, "pad_token_id", None)
    pad_id = pad if isinstance(pad, int) else 0
    return HfEngine(model, max_batch_size=recipe.engine.max_batch_size, pad_id=pad_id, linger_s=linger_s)


def sleep_of(recipe: Recipe, place: torch.device) -> Sleep:
    """What the `vllm` engine on `place` gives back while training. Raises ConfigError where vLLM can't."""
    if recipe.engine.sleep != "on":
        return "off"
    if place.type != "cuda":
        raise ConfigError(
            f"engine.sleep=on: vLLM gives no memory back on the {place.type}, where nothing is kept apart for it; set "
            "engine.sleep=off"
        )
    if recipe.weight_sync.mode == "single_copy":
        return "cache"  # the trainer computes with the weights
    return "drop_weights" if recipe.weight_sync.every_steps == 1 else "keep_weights"


def build_vllm_engine(recipe: Recipe, folder: Path, *, device: torch.device) -> VllmEngine:
    """The `vllm` engine with the model of `folder`, on its own GPU or on `device`, the policy's. Raises ConfigError."""
    engine, model = recipe.engine, recipe.model
    place = device if engine.device is None else choose_device(engine.device, "engine.device")
    settings = VllmSettings(
        folder=folder,
        dtype=model.dtype if engine.dtype == "auto" else engine.dtype,
        max_model_len=filled(engine.max_model_len),
        max_num_seqs=engine.max_batch_size,
        gpu_memory_utilization=filled(engine.gpu_memory_utilization),
        device=str(place),
        seed=recipe.run.seed,
        sleep=sleep_of(recipe, place),
        extra=engine.extra_args,
    )
    return VllmEngine(settings, start_deadline_s=engine.start_deadline_s)


def build_trainer(
    recipe: Recipe,
    model: torch.nn.Module,
    ranks: Ranks | None = None,
    *,
    exact: Mapping[str, torch.Tensor] | None = None,
) -> Trainer:
    """The trainer of a resolved recipe, or one rank of it. `exact` is the policy's."""
    trainer, master_weights, device = recipe.trainer, recipe.trainer.master_weights, choose_device(recipe.trainer.device)
    assert master_weights != "auto", "the recipe was not resolved"
    may_compile = trainer.parallel != "deepspeed"
    settings = TrainerSettings(
        learning_rate=filled(trainer.learning_rate),
        loss=recipe.algorithm.loss_options,
        total_optimizer_steps=filled(recipe.run.steps) * trainer.num_iterations * trainer.optimizer_steps_per_batch,
        optimizer=trainer.optimizer,
        master_weights=master_weights,
        offload_optimizer=trainer.offload_optimizer,
        betas=trainer.betas,
        adam_epsilon=trainer.adam_epsilon,
        weight_decay=trainer.weight_decay,
        schedule=trainer.schedule,
        warmup_steps=filled(trainer.warmup_steps),
        min_learning_rate_ratio=trainer.min_learning_rate_ratio,
        max_grad_norm=trainer.max_grad_norm,
        num_iterations=trainer.num_iterations,
        activations=trainer.activations,
        compiled=trainer.compile == "on" or (trainer.compile == "auto" and device.type == "cuda" and may_compile),
        float32_head=trainer.float32_head,
        parallel=trainer.parallel if trainer.parallel in ("fsdp2", "deepspeed", "zero1") else "replicated",
        shard_ranks=trainer.shard_ranks,
        context_ranks=trainer.context_ranks,
        tensor_ranks=trainer.tensor_ranks,
        share_prefixes=trainer.share_prefixes,
        sync_every_row=trainer.sync_every_row,
        device=str(device),
        seed=recipe.run.seed,
    )
    reference = _reference(recipe, model) if settings.loss.beta > 0 else None
    return Trainer(model, settings, reference=reference, ranks=ranks, exact=exact)


def _reference(recipe: Recipe, model: torch.nn.Module) -> torch.nn.Module:
    """The policy as it starts out: itself without its adapters, or a copy."""
    if has_adapters(model):
        return model
    frozen = copy.deepcopy(model).requires_grad_(False)
    return frozen.cpu() if recipe.trainer.reference_device == "cpu" else frozen


def build_engine_and_bridge(recipe: Recipe, policy: Policy, trainer: Trainer, place: Place) -> tuple[Engine, WeightBridge]:
    """An engine with the policy, in this process or at its peers, and the bridge that keeps it up to date."""
    sync = recipe.weight_sync
    if recipe.engine.kind == "hf":
        engine = build_engine(recipe, copy_for_sampling(trainer.model))
        return engine, InProcessBridge(
            trainer.weights,
            engine,
            frozen=lambda: (frozen_weights(trainer.model), engine.frozen_weights()),
            verify_every=sync.verify_every,
            deadline_s=sync.deadline_s,
        )
    if recipe.engine.kind == "vllm":
        return _vllm_and_bridge(recipe, policy, trainer)
    if recipe.engine.kind == "vllm_server":
        return vllm_servers(recipe, trainer, place)
    urls, token = place.role.peers["engine"], place.role.token
    served = HttpEngine(
        urls,
        token=token,
        start_deadline_s=recipe.engine.start_deadline_s,
        request_deadline_s=recipe.rollout.turn_deadline_s,
    )
    return served, NcclBridge(
        urls,
        trainer.source(),
        token=token,
        host=recipe.engine.host,
        verify_every=sync.verify_every,
        deadline_s=sync.deadline_s,
        on_confirmed=served.confirmed,
    )


def _vllm_and_bridge(recipe: Recipe, policy: Policy, trainer: Trainer) -> tuple[Engine, WeightBridge]:
    sync = recipe.weight_sync
    vllm = build_vllm_engine(recipe, policy.folder, device=next(trainer.model.parameters()).device)
    if sync.mode == "single_copy":
        return vllm, SingleCopyBridge(trainer.model, vllm, deadline_s=sync.deadline_s)
    return vllm, InProcessBridge(trainer.weights, vllm, verify_every=sync.verify_every, deadline_s=sync.deadline_s)


def quiet_libraries() -> None:
    """Keep the tokenizer's fork warnings, transformers' progress bars and what bitsandbytes lacks out of a run's output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
