"""Scores packed rows: log-probabilities of the trained tokens under the temperature they were sampled at.

Shapes: T tokens of a row, N trained tokens of it, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polyturn.errors import ModelError
from polyturn.types import PackedRow

_PROBE_TOKENS = 6
_MOST_LEAK = 0.01
"""Share of the effect of a sample's first token on its later ones that another sample may have; usually exactly 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """A packed row on the device. `[T]` for the row, `[N]` for its trained tokens in order of position."""

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    predicting_N: torch.Tensor
    """Position whose output predicts the trained token: one before it."""
    targets_N: torch.Tensor
    temperature_N: torch.Tensor
    advantages_N: torch.Tensor
    engine_logprobs_N: torch.Tensor
    trajectory_index_N: torch.Tensor
    turn_index_N: torch.Tensor


def to_tensors(row: PackedRow, device: torch.device) -> RowTensors:
    """The tensors of `row`; `N` counts the tokens under its loss mask."""
    trained = np.flatnonzero(row.loss_mask)

    def tensor(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return RowTensors(
        input_ids_T=tensor(row.input_ids),
        position_ids_T=tensor(row.position_ids),
        predicting_N=tensor(trained - 1),
        targets_N=tensor(row.input_ids[trained]),
        temperature_N=tensor(row.temperature[trained]),
        advantages_N=tensor(row.advantages[trained]),
        engine_logprobs_N=tensor(row.engine_logprobs[trained]),
        trajectory_index_N=tensor(row.trajectory_index[trained]),
        turn_index_N=tensor(row.turn_index[trained]),
    )


def trained_logits(model: Any, row: RowTensors) -> torch.Tensor:
    """Logits that predict the trained tokens of `row`, `[N, V]` in float32, divided by their temperature.

    The samples of a row don't see each other: transformers builds the block mask from positions that restart at each
    sample. Every token of a sample is attended to, tool text included; only the trained ones are scored.
    """
    out = model(
        input_ids=row.input_ids_T[None],
        position_ids=row.position_ids_T[None],
        attention_mask=None,
        use_cache=False,
        logits_to_keep=row.predicting_N,
    )
    logits_NV: torch.Tensor = out.logits[0].float()
    return logits_NV / row.temperature_N[:, None]


def trained_logprobs(model: Any, row: RowTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """`trainer_logprobs_N` with gradient and `entropy_N` without, of the trained tokens of `row`."""
    all_logprobs_NV = torch.log_softmax(trained_logits(model, row), dim=-1)
    logprobs_N = all_logprobs_NV.gather(-1, row.targets_N[:, None])[:, 0]
    with torch.no_grad():
        entropy_N = -(all_logprobs_NV.exp() * all_logprobs_NV).sum(-1)
    return logprobs_N, entropy_N


@torch.no_grad()
def refuse_mixed_samples(model: Any) -> None:
    """Raise ModelError unless `model` keeps the samples of a row apart, tried on a row of two.

    Not every architecture of transformers reads positions that restart as a new sample: some attend across, some carry a
    state over. Training on such rows would go wrong without a sign.
    """
    device, vocab = next(model.parameters()).device, model.get_input_embeddings().weight.shape[0]
    ids_T = torch.arange(2 * _PROBE_TOKENS, device=device) % vocab
    position_ids = torch.arange(_PROBE_TOKENS, device=device).repeat(2)[None]
    keep = torch.arange(_PROBE_TOKENS + 1, 2 * _PROBE_TOKENS, device=device)

    def after_its_first_token(changed: int | None) -> torch.Tensor:
        ids = ids_T.clone()
        if changed is not None:
            ids[changed] = (ids[changed] + vocab // 2) % vocab
        out = model(input_ids=ids[None], position_ids=position_ids, attention_mask=None, use_cache=False, logits_to_keep=keep)
        logits: torch.Tensor = out.logits[0].float()
        return logits

    plain = after_its_first_token(None)
    leak = (after_its_first_token(_PROBE_TOKENS - 1) - plain).abs().max()
    own = (after_its_first_token(_PROBE_TOKENS) - plain).abs().max()
    if leak > _MOST_LEAK * own:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ModelError(
            f"models of type {kind} let the samples of a packed row see each other (they ignore position_ids that restart), so "
            "training on them would be wrong; choose a model of another architecture, such as Llama, Mistral or Qwen3"
        )
