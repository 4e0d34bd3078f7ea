"""The client of vLLM servers, and the bridge that brings them weights."""

from __future__ import annotations

import os

from polyturn.config.schema import Recipe
from polyturn.engine.http import HttpEngine
from polyturn.loop.place import Place
from polyturn.trainer.trainer import Trainer
from polyturn.weight_sync.base import WeightBridge, WholeWeights
from polyturn.weight_sync.nccl import NcclBridge

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
    return engine, NcclBridge(
        urls,
        WholeWeights(trainer.weights),
        token=token,
        host=recipe.engine.host,
        verify_every=recipe.weight_sync.verify_every,
        deadline_s=recipe.weight_sync.deadline_s,
        on_confirmed=engine.confirmed,
        may_miss=True,
    )
