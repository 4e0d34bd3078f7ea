"""Drawing one token for each row of a batch: noise from the request's own seed, truncation, log-probabilities.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from polyturn.errors import NonFiniteError
from polyturn.types import SamplingParams


@dataclass(slots=True)
class Row:
    """A request while it is being sampled."""

    sampling: SamplingParams
    uniforms: np.ndarray[Any, np.dtype[np.float64]]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def finished(self) -> bool:
        """Whether it stopped or has all the tokens it may have."""
        return self.stopped or len(self.ids) >= self.sampling.max_tokens


def uniforms_of(sampling: SamplingParams) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One uniform number per token, from the request's own seed."""
    return np.random.Generator(np.random.Philox(key=sampling.seed)).random(sampling.max_tokens)


def sample(logits_BV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Append one token to each row and return them, `[B]`. Log-probabilities are under temperature, before truncation."""
    temperature_B = torch.tensor([row.sampling.temperature or 1.0 for row in rows], device=logits_BV.device)
    logprobs_BV = torch.log_softmax(logits_BV / temperature_B[:, None], dim=-1)
    probs_BV = _truncate(logprobs_BV.exp().double(), rows)
    cumulative_BV = probs_BV.cumsum(dim=-1)
    uniform_B = torch.tensor([row.uniforms[len(row.ids)] for row in rows], dtype=torch.float64, device=logits_BV.device)
    # Inverse of the cumulative distribution: the first token whose cumulative probability exceeds the number drawn.
    token_B = torch.searchsorted(cumulative_BV, (uniform_B * cumulative_BV[:, -1])[:, None], right=True)[:, 0]
    token_B = token_B.clamp_max(logits_BV.shape[-1] - 1)
    greedy_B = torch.tensor([row.sampling.temperature == 0 for row in rows], device=logits_BV.device)
    token_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), token_B)
    chosen = logprobs_BV.gather(-1, token_B[:, None])[:, 0].tolist()
    if not all(map(math.isfinite, chosen)):
        raise NonFiniteError("a log-probability of the engine is nan or inf: the weights that it samples with are broken")
    for row, token, logprob in zip(rows, token_B.tolist(), chosen, strict=True):
        row.ids.append(token)
        row.logprobs.append(logprob)
        row.stopped = token in row.sampling.stop_ids
    return token_B


def _truncate(probs_BV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Zero what top_k, min_p and top_p exclude, row by row; untouched when no row asks for it."""
    for index, row in enumerate(rows):
        sampling, probs_V = row.sampling, probs_BV[index]
        if sampling.top_k and sampling.top_k < probs_V.shape[-1]:
            probs_V[probs_V < probs_V.topk(sampling.top_k).values[-1]] = 0
        if sampling.min_p > 0:
            probs_V[probs_V < sampling.min_p * probs_V.max()] = 0
        if sampling.top_p < 1:
            ordered, order = probs_V.sort(descending=True)
            before = ordered.cumsum(0) - ordered
            probs_V[order[before >= sampling.top_p * ordered.sum()]] = 0
    return probs_BV
