"""What ranks with shards, parts of rows or parts of layers train, and one rank with whole weights beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from numerics.test_shared_prefixes import ALWAYS, everything
from numerics.test_trainer_invariance import LOSSES
from parts.models import tiny_model
from parts.samples import loss_options, make_sample, on_policy, packed, random_samples
from polyturn.trajectories.pack import pack
from polyturn.types import TrainBatch


def batches(count: int = 1, *, rows: int | None = None) -> list[TrainBatch]:
    samples = on_policy(random_samples(), tiny_model(), gap=0.3)
    size = max(map(len, samples)) if rows is None else rows
    return [packed(samples[index::count], row_tokens=size) for index in range(count)]


CASES: dict[str, dict[str, Any]] = {
    **{f"loss {name}": {"loss": loss, "steps": [batches(), batches(2)]} for name, loss in LOSSES.items()},
    "adamw, three steps": {"settings": {"optimizer": "adamw", "learning_rate": 1e-3}, "steps": [batches()] * 3},
    "kl, two passes": {
        "loss": loss_options(beta=0.1, ratio_level="turn"),
        "settings": {"num_iterations": 2},
        "steps": [batches(2)],
    },
    "one row": {"steps": [batches(rows=1000)]},
    "tied": {"model": {"tie_word_embeddings": True}},
    "experts": {"architecture": "qwen3_moe"},
    "a head of its own kind": {"architecture": "gemma2"},
    "full recomputation": {"settings": {"activations": "full"}},
    "selective recomputation": {"settings": {"activations": "selective"}},
    "clipped hard": {"settings": {"max_grad_norm": 1e-3}},
    "summed after every row": {"settings": {"sync_every_row": True}, "steps": [batches(), batches(2)]},
    "adapters, kl": {"lora": True, "loss": loss_options(beta=0.1), "steps": [batches()] * 2},
    "bfloat16, masters": {
        "dtype": torch.bfloat16,
        "settings": {"master_weights": "float32"},
        "exact": dict(tiny_model().named_parameters()),
    },
    "bfloat16, adapters with masters": {"dtype": torch.bfloat16, "lora": True, "settings": {"master_weights": "float32"}},
}


def shared_beginnings() -> list[TrainBatch]:
    """A row that is a tree: siblings whose prompt is there once."""
    return [pack(on_policy(everything(), tiny_model(), gap=0.3), row_tokens=400, planned_trajectories=12, sharing=ALWAYS)]


def only_the_end() -> list[TrainBatch]:
    """A row of which most ranks have no trained token, and one of fewer tokens than chunks."""
    rng = np.random.default_rng(0)
    return [packed([make_sample(0, [(30, 2, 1.0)], rng=rng), make_sample(1, [(2, 1, -0.5)], rng=rng)], row_tokens=32)]


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}


CUT_CASES: dict[str, dict[str, Any]] = {
    **CASES,
    "float64": {"dtype": torch.float64, "steps": [batches(), batches(rows=1000)]},
    "only the end is trained": {"steps": [only_the_end()]},
    "a window": {"architecture": "mistral"},
    "a window, other positions": {"architecture": "gemma3"},
    "norms of heads": {"architecture": "qwen3"},
    "biases": {"architecture": "qwen2"},
    "shared beginnings": {"settings": {"share_prefixes": "on"}, "steps": [shared_beginnings()]},
    "compiled": {"settings": {"compiled": True}},
}
del CUT_CASES["a head of its own kind"]  # its attention is eager, which is refused
for _weights_alone in ("loss token mean", "loss sequence mean", "loss cispo, token mis"):
    del CUT_CASES[_weights_alone]  # their tokens' losses know nothing of others


_HALF: dict[str, Any] = {"kernels": True, "dtype": torch.bfloat16, "settings": {"master_weights": "float32"}}
KERNEL_CASES: dict[str, dict[str, Any]] = {
    "bfloat16, kernels": {**_HALF, "model": {"hidden_size": 128}},
    "bfloat16, kernels, a window": {**_HALF, "architecture": "mistral", "model": {"hidden_size": 128}},
    "bfloat16, kernels, compiled": {
        **_HALF,
        "model": {"hidden_size": 128},
        "settings": {**_HALF["settings"], "compiled": True, "activations": "selective"},
    },
}
"""Of GPUs alone, whose kernels take no heads of less than 32."""


LAYER_CASES: dict[str, dict[str, Any]] = {
    name: case
    for name, case in CUT_CASES.items()
    if "adapters" not in name and name not in ("experts", "only the end is trained")
} | {
    "logits that are scaled": {"architecture": "granite"},
    "no norm between": {"architecture": "cohere"},
    "four heads of keys": {"model": {"num_key_value_heads": 4}, "steps": [batches(), batches(2)]},
    "bfloat16, stochastic": {"dtype": torch.bfloat16, "settings": {"master_weights": "stochastic"}},
}
