"""Puts a run together. The only place that names concrete engines and bridges."""

from __future__ import annotations

import copy
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from polyturn.config.schema import Recipe, filled
from polyturn.engine.base import Engine
from polyturn.engine.hf import HfEngine
from polyturn.engine.http import HttpEngine
from polyturn.environments.base import Environment
from polyturn.errors import ConfigError, ModelError
from polyturn.loop.check import chat_template, refuse_short_context
from polyturn.loop.place import Place
from polyturn.loop.tiny import ensure_tiny
from polyturn.models.folder import SMOLLM2, TINY, max_positions, model_folder
from polyturn.models.load import load_model
from polyturn.models.smollm2 import ensure_smollm2
from polyturn.processes.threads import in_thread_within
from polyturn.rendering.renderer import Renderer
from polyturn.trainer.attention import use_attention, use_plain_attention
from polyturn.trainer.layers import plain_layers
from polyturn.trainer.ranks import Ranks
from polyturn.trainer.settings import TrainerSettings
from polyturn.trainer.trainer import Trainer
from polyturn.weight_sync.base import WeightBridge, WholeWeights
from polyturn.weight_sync.in_process import InProcessBridge
from polyturn.weight_sync.nccl import NcclBridge

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
    """A loaded model with the folder it came from and the renderer that goes with it."""

    model: torch.nn.Module
    folder: Path
    renderer: Renderer


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one, the rank's own of several ranks. Raises ConfigError for a device that isn't there."""
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        own = os.environ.get("LOCAL_RANK")  # torchrun's
        return torch.device("cuda" if own is None else f"cuda:{own}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"trainer.device={name!r} is no device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(
            f"trainer.device={name} but this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    return device


async def load_policy(recipe: Recipe, environment: Environment, say: Say, *, path: str | None = None) -> Policy:
    """Load `path`, or the recipe's model; a built-in one is made when the cache doesn't hold it.

    Raises:
        ConfigError: a device that isn't there.
        ModelError: not loadable, not made for its tokenizer, or its context is shorter than `rollout.max_trajectory_tokens`.
    """
    device = choose_device(recipe.trainer.device)
    if recipe.trainer.threads is not None:
        torch.set_num_threads(recipe.trainer.threads)
    path = path or recipe.model.path
    make = BUILTIN_MODELS.get(path)
    folder = model_folder(path) if make is None else await make(recipe, environment, say)
    refuse_short_context(recipe, path, max_positions(folder))
    renderer = Renderer.load(folder, chat_template=chat_template(recipe))
    model = load_model(folder, dtype=recipe.model.dtype, attention=recipe.model.attention, device=device)
    refuse_missing_rows(path, model, renderer.tokenizer.vocab_size)
    use_attention(model, recipe.model.attention)
    return Policy(model=model, folder=folder, renderer=renderer)


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


def build_trainer(recipe: Recipe, model: torch.nn.Module, ranks: Ranks | None = None) -> Trainer:
    """The trainer of a resolved recipe, or one rank of it."""
    trainer = recipe.trainer
    settings = TrainerSettings(
        learning_rate=filled(trainer.learning_rate),
        loss=recipe.algorithm.loss_options,
        total_optimizer_steps=filled(recipe.run.steps) * trainer.num_iterations * trainer.optimizer_steps_per_batch,
        optimizer=trainer.optimizer,
        betas=trainer.betas,
        adam_epsilon=trainer.adam_epsilon,
        weight_decay=trainer.weight_decay,
        schedule=trainer.schedule,
        warmup_steps=filled(trainer.warmup_steps),
        min_learning_rate_ratio=trainer.min_learning_rate_ratio,
        max_grad_norm=trainer.max_grad_norm,
        num_iterations=trainer.num_iterations,
        activations=trainer.activations,
        compiled=trainer.compile == "on" or (trainer.compile == "auto" and next(model.parameters()).is_cuda),
        float32_head=trainer.float32_head,
    )
    reference = copy.deepcopy(model).requires_grad_(False) if settings.loss.beta > 0 else None
    return Trainer(model, settings, reference=reference, ranks=ranks)


def build_engine_and_bridge(recipe: Recipe, trainer: Trainer, place: Place) -> tuple[Engine, WeightBridge]:
    """An engine with a copy of the policy, in this process or at its peers, and the bridge that keeps the copy up to date."""
    sync = recipe.weight_sync
    if recipe.engine.kind == "hf":
        engine = build_engine(recipe, copy.deepcopy(trainer.model))
        return engine, InProcessBridge(trainer.weights, engine, verify_every=sync.verify_every, deadline_s=sync.deadline_s)
    urls, token = place.role.peers["engine"], place.role.token
    served = HttpEngine(
        urls,
        token=token,
        start_deadline_s=recipe.engine.start_deadline_s,
        request_deadline_s=recipe.rollout.turn_deadline_s,
    )
    return served, NcclBridge(
        urls,
        WholeWeights(trainer.weights),
        token=token,
        host=recipe.engine.host,
        verify_every=sync.verify_every,
        deadline_s=sync.deadline_s,
        on_confirmed=served.confirmed,
    )


def quiet_libraries() -> None:
    """Keep the tokenizer's fork warnings and transformers' progress bars out of a run's output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
