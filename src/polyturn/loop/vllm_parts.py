"""The client of vLLM servers, and the bridge that brings them weights."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from polyturn.config.schema import Recipe, filled
from polyturn.engine.http import HttpEngine
from polyturn.errors import ConfigError
from polyturn.loop.place import Place
from polyturn.models.adapters import frozen_weights, save_adapters
from polyturn.processes.role import read_control
from polyturn.trainer.trainer import Trainer
from polyturn.weight_sync.base import WeightBridge
from polyturn.weight_sync.lora import LoraBridge
from polyturn.weight_sync.nccl import NcclBridge
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.restart import RestartBridge
from polyturn.weight_sync.single_copy_server import SingleCopyServerBridge

KEY = "VLLM_API_KEY"
"""Variable with the token of servers that others started; it is the one that vLLM reads its own from."""


def vllm_servers(recipe: Recipe, trainer: Trainer, place: Place) -> tuple[HttpEngine, WeightBridge]:
    """Client and bridge of a resolved recipe, to the servers of the run or those at `engine.urls`."""
    own = not recipe.engine.urls
    urls = place.role.peers["engine"] if own else recipe.engine.urls
    token = place.role.token if own else os.environ.get(KEY) or None
    engine = HttpEngine(
        urls,
        token=token,
        start_deadline_s=recipe.engine.start_deadline_s,
        request_deadline_s=recipe.rollout.turn_deadline_s,
    )
    sync, model = recipe.weight_sync, trainer.model
    usual: dict[str, Any] = {
        "token": token,
        "verify_every": sync.verify_every,
        "deadline_s": sync.deadline_s,
        "probe": _probe(recipe, trainer),
        "on_confirmed": engine.confirmed,
    }
    if sync.mode == "lora":
        lora = filled(recipe.model.lora)
        base, folder = list(frozen_weights(model)), place.role.folder / "adapters"

        def save(target: Path) -> None:
            save_adapters(model, target, trainer.state_to_save())

        frozen = partial(trainer.whole, base)
        return engine, LoraBridge(urls, trainer.whole, frozen, save, folder, scaling=lora.alpha / lora.rank, **usual)
    if sync.mode == "single_copy":
        return engine, SingleCopyServerBridge(urls, trainer.beside_engines, **usual)
    if sync.mode == "restart":
        save, folder = partial(_save, model), place.role.folder / "weights"
        return engine, RestartBridge(urls, _controls(place, len(urls)), trainer.weights, save, folder, **usual)
    return engine, NcclBridge(urls, trainer.source(), host=recipe.engine.host, may_miss=True, **usual)


def _probe(recipe: Recipe, trainer: Trainer) -> Probe | None:
    """What stands in for checksums; None where the recipe sets no limit to compare with."""
    limit = recipe.weight_sync.max_mismatch
    if limit is None:
        return None
    embeddings: Any = trainer.model
    vocab_size = int(embeddings.get_input_embeddings().weight.shape[0])
    return Probe(score=trainer.logprobs_of, limit=limit, vocab_size=vocab_size)


def _controls(place: Place, count: int) -> list[str]:
    """Where the roles of the servers take orders. Raises ConfigError when their run folder is not this one."""
    found = [read_control(place.role.folder, f"engine-{number}") for number in range(count)]
    controls = [control for control in found if control is not None]
    if len(controls) < count:
        raise ConfigError(
            f"weight_sync.mode=restart: {place.role.folder}/roles says where to restart {len(controls)} of {count} servers; "
            "the trainer and they need one run folder"
        )
    return controls


def _save(model: Any, folder: Any) -> None:
    model.save_pretrained(folder, safe_serialization=True)
