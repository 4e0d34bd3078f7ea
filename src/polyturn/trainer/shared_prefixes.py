"""Whether a policy can be trained on rows with common beginnings laid down once, and what that would save it."""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
import torch

from polyturn.errors import ModelError
from polyturn.trainer.attention import VARLEN
from polyturn.trainer.layers import decoder_layers
from polyturn.trainer.reference import without_gradient
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.sharding import computes_in, rows_of
from polyturn.trajectories.pack import pack
from polyturn.trajectories.prefixes import SHORTEST
from polyturn.trajectories.sharing import Sharing
from polyturn.types import TrainSample

_MOST_GAP = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Between log-probabilities with and without; usually far less. Types of 16 bits round too much to be held to less than 0.1."""

_LEAST = 3.3e11
"""What a layer can compute forward, in operations, while its kernels are launched, forward and backward, on an H200: 2.5 ms."""
_PER_NUMBER = 8e3
"""The same of laying out a number of a key or value anew, and of adding up its gradients. Both: see docs/scaling.md."""

_log = logging.getLogger(__name__)


def sharing_of(score: Scorer, asked: Literal["auto", "on", "off"]) -> Sharing | None:
    """When rows of `score.model` share beginnings; None for never. Raises ModelError where `on` can't be had.

    A model that gives other log-probabilities with than without doesn't share: that is tried out.
    """
    attention = getattr(score.model.config, "_attn_implementation", "sdpa")
    if asked == "off":
        return None
    gap = _gap(score) if score.may_share() else None
    if gap is None or not gap <= _MOST_GAP.get(computes_in(score.model), 0.1):
        why = "its attention has a window, or is neither varlen, sdpa nor eager"
        if gap is not None:
            why = f"log-probabilities differ by {gap:.2g}"
        if asked == "on":
            raise ModelError(f"trainer.share_prefixes=on: this model can't ({why}); use auto or off")
        _log.info("prefixes are not shared: %s", why)
        return None
    on_gpu = next(score.model.parameters()).is_cuda
    return costs(score.model, dense=attention != VARLEN, on_gpu=on_gpu, always=asked == "on")


def costs(model: Any, *, dense: bool, on_gpu: bool, always: bool = False) -> Sharing:
    """In operations of a forward pass: twice the weights a token, four times heads x head size a pair and layer."""
    layers, config = decoder_layers(model), model.config
    weights = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads) * size
    # What a compiled layer keeps of a token.
    inside = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    kept = 4 * config.hidden_size + 2 * heads * size + 5 * keys + 3 * inside
    return Sharing(
        per_token=2.0 * weights,
        per_pair=4.0 * heads * size * len(layers),
        per_key=0.0 if dense else 2.0 * keys * _PER_NUMBER * len(layers),
        room_per_key=0.0 if dense else 2 * keys / kept,
        least=_LEAST * len(layers) if on_gpu else 0.0,
        dense=dense,
        always=always,
    )


def _gap(score: Scorer) -> float:
    """The largest difference that sharing makes to the log-probabilities of three samples with one beginning."""
    device = next(score.model.parameters()).device
    vocabulary = rows_of(score.model.get_input_embeddings().weight)
    common = np.arange(SHORTEST, dtype=np.int64) * 7919 % vocabulary
    samples = [_sample(np.concatenate([common, (number + np.arange(3, 7 + number)) % vocabulary])) for number in range(3)]
    found = []
    for sharing in (None, Sharing(per_token=1.0, per_pair=0.0, always=True)):
        batch = pack(samples, row_tokens=sum(map(len, samples)), planned_trajectories=3, sharing=sharing)
        rows = [to_tensors(row, device) for row in batch.rows]
        logprobs = torch.cat(without_gradient(score, rows))
        places = torch.cat([row.trajectory_index_N * 1000 + row.turn_index_N for row in rows])
        found.append(logprobs[places.argsort()])
    return float((found[0] - found[1]).abs().max())


def _sample(ids: np.ndarray[Any, np.dtype[np.int64]]) -> TrainSample:
    """Trained after the common tokens; each token is a turn of its own, so that it can be found again."""
    length = len(ids)
    trained = np.arange(length) >= SHORTEST
    return TrainSample(
        trajectory_id=f"probe/{int(ids[-1])}/{length}",
        group_id="probe",
        temperature=1.0,
        input_ids=ids,
        loss_mask=trained,
        advantages=np.zeros(length, dtype=np.float32),
        engine_logprobs=np.zeros(length, dtype=np.float32),
        turn_index=np.where(trained, np.arange(length), -1).astype(np.int64),
        policy_version=np.where(trained, 0, -1).astype(np.int64),
    )
