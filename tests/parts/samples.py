"""Random training samples, and the same ones cut in other ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from parts.models import VOCAB, plain_logprobs
from polyturn.config.presets import resolve_loss
from polyturn.config.schema import LossOptions
from polyturn.trainer.settings import TrainerSettings
from polyturn.trajectories.pack import pack
from polyturn.types import TrainBatch, TrainSample

BUDGET = 40
"""`fixed_length` of the losses here."""


def make_sample(
    trajectory: int,
    turns: Sequence[tuple[int, int, float]],
    *,
    rng: np.random.Generator,
    temperature: float = 1.0,
    first_turn: int = 0,
    version: int = 0,
) -> TrainSample:
    """A sample of random ids. `turns` are (tokens read, tokens sampled, advantage)."""
    mask, advantages, index = [], [], []
    for number, (read, sampled, advantage) in enumerate(turns, first_turn):
        mask += [False] * read + [True] * sampled
        advantages += [0.0] * read + [advantage] * sampled
        index += [-1] * read + [number] * sampled
    trained = np.array(mask)
    return TrainSample(
        trajectory_id=f"task/{trajectory // 2}/{trajectory % 2}",
        group_id=f"task/{trajectory // 2}",
        temperature=temperature,
        input_ids=rng.integers(3, VOCAB, len(mask)),
        loss_mask=trained,
        advantages=np.array(advantages, dtype=np.float32),
        engine_logprobs=np.where(trained, rng.uniform(-4, -1, len(mask)), 0).astype(np.float32),
        turn_index=np.array(index, dtype=np.int64),
        policy_version=np.where(trained, version, -1).astype(np.int64),
    )


def random_samples(seed: int = 0, *, count: int = 6, temperature: float = 1.0) -> list[TrainSample]:
    """One sample a trajectory, of one to three turns and unequal lengths."""
    rng = np.random.default_rng(seed)
    return [
        make_sample(
            number,
            [(int(rng.integers(2, 6)), int(rng.integers(1, 6)), float(rng.normal())) for _ in range(1 + number % 3)],
            rng=rng,
            temperature=temperature,
        )
        for number in range(count)
    ]


def on_policy(samples: Sequence[TrainSample], model: torch.nn.Module, *, gap: float = 0.0, seed: int = 1) -> list[TrainSample]:
    """`samples` with the engine log-probabilities of `model`, changed by noise of size `gap`."""
    rng = np.random.default_rng(seed)
    made = []
    for sample in samples:
        own = np.zeros(len(sample), dtype=np.float32)
        own[1:] = plain_logprobs(model, sample.input_ids, sample.temperature).numpy()
        noise = rng.normal(0, gap, len(own)).astype(np.float32)
        made.append(replace(sample, engine_logprobs=np.where(sample.loss_mask, own + noise, 0).astype(np.float32)))
    return made


def packed(samples: Sequence[TrainSample], row_tokens: int = 1024, planned: int | None = None) -> TrainBatch:
    planned = planned or len({sample.trajectory_id for sample in samples})
    return pack(samples, row_tokens=row_tokens, planned_trajectories=planned)


def alone(samples: Sequence[TrainSample]) -> TrainBatch:
    """One sample a row: nothing shares a row, and no row is padded."""
    planned = len({sample.trajectory_id for sample in samples})
    whole = pack(samples, row_tokens=10_000, planned_trajectories=planned)
    rows = [pack([sample], row_tokens=10_000, planned_trajectories=planned).rows[0] for sample in samples]
    numbered = [
        replace(row, trajectory_index=np.full_like(row.trajectory_index, whole.trajectory_ids.index(sample.trajectory_id)))
        for row, sample in zip(rows, samples, strict=True)
    ]
    return replace(whole, rows=tuple(numbered))


def loss_options(preset: str = "grpo", *, correction: str = "none", fixed_length: int = BUDGET, **given: Any) -> LossOptions:
    return resolve_loss(preset, LossOptions(**given), fixed_length=fixed_length, default_correction=correction)


def trainer_settings(loss: LossOptions | None = None, **given: Any) -> TrainerSettings:
    values: dict[str, Any] = {"learning_rate": 1e-2, "total_optimizer_steps": 10, "loss": loss or loss_options()}
    return TrainerSettings(**(values | given))
