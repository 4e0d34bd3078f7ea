"""Attention of a rank's tokens to the keys of all ranks of its context group, and the proof that a model can be cut so.

Registered with transformers under names of ours, as `trainer.attention` is: one over PyTorch's variable-length kernels, for
which nothing of tokens x tokens is held, and one over transformers' SDPA with a mask of this rank's tokens x all tokens. Which
one a model gets follows from what it attended with before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyturn.errors import ModelError
from polyturn.trainer.attention import VARLEN, at_places, causal_varlen
from polyturn.trainer.context import Context, Part, alone, own_part
from polyturn.trainer.row import RowTensors, to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trainer.sharding import computes_in
from polyturn.types import PackedRow

CONTEXT_MASKED, CONTEXT_VARLEN = "polyturn_context_masked", "polyturn_context_varlen"
_OURS = {"sdpa": CONTEXT_MASKED, VARLEN: CONTEXT_VARLEN}
_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that change with the longest position of what a rank computes, which would be another on each."""
_MOST_GAP = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Between log-probabilities of a cut row and of a whole one; usually far less. Types of 16 bits round too much to be held to
less than 0.1."""


def attend_across(model: Any) -> None:
    """Make `model` attend to the keys of all ranks of a row. Raises ModelError where its attention can't be replaced."""
    attention, kind = model.config._attn_implementation, getattr(model.config, "model_type", type(model).__name__)
    if attention not in _OURS:
        raise ModelError(
            f"trainer.context_ranks cuts rows over ranks for attention by sdpa or varlen, and this model of type {kind} uses "
            f"{attention}; set model.attention=auto, or trainer.context_ranks=1"
        )
    rope = getattr(model.config, "rope_parameters", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type") in _BY_LENGTH:
        raise ModelError(
            f"trainer.context_ranks: this model's positions are of kind {rope['rope_type']}, whose frequencies follow the "
            "longest position of a rank's tokens, which differ; set trainer.context_ranks=1"
        )
    from transformers import AttentionInterface

    for name, attend in ((CONTEXT_MASKED, masked), (CONTEXT_VARLEN, by_samples)):
        AttentionInterface.register(name, _attention(attend))
    model.set_attn_implementation(_OURS[attention])


class CutProbe:
    """Two samples, cut within both, whose log-probabilities must be those of the uncut row."""

    def __init__(self, score: Scorer, context: Context) -> None:
        device = next(score.model.parameters()).device
        vocabulary = score.model.get_input_embeddings().weight.shape[0]
        row = _two_samples(4 * context.size + 3, vocabulary)
        self._score, self._limit = score, _MOST_GAP.get(computes_in(score.model), 0.1)
        self._own = own_part(row, device, context)
        self._whole = self._logprobs(to_tensors(row, device))

    def gap(self) -> float:
        """The largest difference on this rank, once the model attends across ranks. A collective."""
        own_N = self._own.own_N
        assert own_N is not None
        difference = (self._logprobs(self._own) - self._whole[own_N]).abs()
        return float(difference.max()) if len(difference) else 0.0

    def refuse(self, gaps: list[float]) -> None:
        """Raise ModelError where some rank's is too large."""
        wrong = [gap for gap in gaps if not gap <= self._limit]  # also what is no number
        if wrong:
            worst = max(wrong)
            kind = getattr(self._score.model.config, "model_type", "?")
            raise ModelError(
                f"models of type {kind} can't be cut by tokens: log-probabilities differ by {worst:.2g} between a row on "
                "several ranks and on one (something besides attention looks at other tokens); set trainer.context_ranks=1"
            )

    @torch.no_grad()
    def _logprobs(self, row: RowTensors) -> Tensor:
        return self._score(row)[0].clone()


def _two_samples(half: int, vocabulary: int) -> PackedRow:
    length = 2 * half - 1
    zeros, floats = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.float32)
    positions = np.concatenate([np.arange(half), np.arange(half - 1)])
    return PackedRow(
        input_ids=np.arange(length, dtype=np.int64) * 7919 % vocabulary,
        position_ids=positions,
        cu_seqlens=np.array([0, half, length], dtype=np.int64),
        loss_mask=positions > 0,
        advantages=floats,
        engine_logprobs=floats,
        temperature=floats + 1,
        trajectory_index=zeros,
        turn_index=zeros,
        policy_version=zeros,
    )


def _across(part: Part, key_1MtD: Tensor, value_1MtD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole row, in one collective."""
    heads, tokens = key_1MtD.shape[1], key_1MtD.shape[2] * part.context.size
    own_tW = torch.cat([states[0].transpose(0, 1).flatten(1) for states in (key_1MtD, value_1MtD)], dim=-1)
    whole_TW = part.from_all(own_tW)
    key_TW, value_TW = torch.split(whole_TW, [heads * key_1MtD.shape[-1], heads * value_1MtD.shape[-1]], dim=-1)
    key_1MTD, value_1MTD = (states.view(tokens, heads, -1).transpose(0, 1)[None] for states in (key_TW, value_TW))
    return key_1MTD, value_1MTD


def _attention(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """What transformers calls, over `attend`, which gets the keys and values of the whole row."""

    def attention(
        module: torch.nn.Module,
        query_1NtD: Tensor,
        key_1MtD: Tensor,
        value_1MtD: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        context_part: Part | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert dropout == 0.0, "the policy that is trained is the one that sampled: there is no dropout"
        part = context_part or alone(query_1NtD.shape[2], query_1NtD.device)
        key_1MTD, value_1MTD = _across(part, key_1MtD, value_1MtD)
        return attend(module, query_1NtD, key_1MTD, value_1MTD, part, scaling, sliding_window), None

    # Collectives, and shapes that differ from row to row.
    plain: Callable[..., tuple[Tensor, None]] = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]
    return plain


def masked(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float | None, window: int | None
) -> Tensor:
    """With a mask of this rank's tokens x all tokens, `[1, t, N, D]`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out_1tND: Tensor = sdpa_attention_forward(module, query, key, value, part.mask(window), scaling=scaling)[0]
    return out_1tND


def by_samples(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float | None, window: int | None
) -> Tensor:
    """Without one, `[1, t, N, D]`: each chunk by the samples in it, or by its segments where they follow others."""
    query_tND, key_TMD, value_TMD = (states[0].transpose(0, 1) for states in (query, key, value))
    if part.tree is not None:
        seen = part.tree.seen
        starts, longest = (seen.cu_queries, seen.cu_keys), (seen.longest_query, seen.longest_key)
        keys, values = (at_places(states, seen.index_U) for states in (key_TMD, value_TMD))
        return causal_varlen(query_tND, keys, values, starts, longest, scaling=scaling, window=window)[None]
    parts = [
        causal_varlen(
            query_tND[chunk.queries],
            key_TMD[chunk.keys],
            value_TMD[chunk.keys],
            (chunk.cu_queries, chunk.cu_keys),
            (chunk.longest_query, chunk.longest_key),
            scaling=scaling,
            window=window,
        )
        for chunk in part.chunks
    ]
    return torch.cat(parts)[None]
