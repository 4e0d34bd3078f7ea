"""Scores packed rows with a model: hidden states once, then the log-probability of every trained token.

Where the model's head is a plain product, as it is nearly everywhere, it runs in chunks (`trainer.head`). Whether it is one is
tried out when the trainer starts: a model that does anything else to its logits keeps its own way, at the price of memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyturn.errors import ModelError
from polyturn.trainer.attention import VARLEN, as_length
from polyturn.trainer.head import HeadShape, head_logprobs
from polyturn.trainer.row import RowTensors
from polyturn.trainer.sharding import as_forward, computes_in, rows_of

_log = logging.getLogger(__name__)
_PROBE_TOKENS = 6
_MOST_LEAK = 0.01
"""Share of the effect of a sample's first token on its later ones that another sample may have; usually exactly 0."""
_MOST_GAP = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}
"""Of logits, relative to the largest: the model's own are rounded to its type, the head's are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The parts of a causal language model that matter here: what comes before the head, and the head."""

    backbone: Any
    output: torch.nn.Linear
    shape: HeadShape

    def logprobs(
        self, hidden_NH: Tensor, targets_N: Tensor, temperature_N: Tensor, *, in_float32: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`logprobs_N` and `entropy_N` of `trainer.head`."""
        weight_VH: Tensor = self.output.weight
        # None in most models, whatever the annotation of torch says.
        bias_V: Tensor | None = self.output.bias
        if in_float32:
            weight_VH, bias_V = weight_VH.float(), None if bias_V is None else bias_V.float()
        return head_logprobs(hidden_NH, weight_VH, targets_N, temperature_N, bias_V=bias_V, shape=self.shape)


class Scorer:
    """Scores rows with `model`. `float32_head` computes the head in float32 also where the weights are bfloat16."""

    def __init__(self, model: Any, *, chunked_head: bool = True, float32_head: bool = False) -> None:
        self.model = model
        self._float32_head = float32_head
        self._head = find_head(model) if chunked_head else None

    @property
    def _attention(self) -> str:
        return getattr(self.model.config, "_attn_implementation", "sdpa")

    def may_share(self) -> bool:
        """Whether the model may be given rows whose segments follow others; whether it heeds them is tried out apart.

        Under a mask, a window over the newest tokens would count them by their place in the row.
        """
        config = self.model.config
        windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        return self._attention == VARLEN or (self._attention in ("sdpa", "eager") and not windowed)

    @property
    def chunked(self) -> bool:
        """Whether the head runs in chunks."""
        return self._head is not None

    def __call__(self, row: RowTensors) -> tuple[Tensor, Tensor]:
        """`trainer_logprobs_N` with gradient and `entropy_N` without, of the trained tokens of `row`."""
        return as_forward(self.model, partial(self._scored, row))

    def _scored(self, row: RowTensors) -> tuple[Tensor, Tensor]:
        if self._head is None:
            return _of_logits(self._run(self.model, row, logits_to_keep=row.predicting_N).logits[0], row)
        hidden_TH: Tensor = self._run(self._head.backbone, row).last_hidden_state[0]
        return self._head.logprobs(hidden_TH[row.predicting_N], row.targets_N, row.temperature_N, in_float32=self._float32_head)

    def _run(self, module: Any, row: RowTensors, **options: Any) -> Any:
        """A forward pass in which the samples of the row don't see each other.

        SDPA and eager attention get a block mask, which transformers builds from positions that restart at each sample; the
        others are told where samples begin. Where segments follow others, the mask is ours, or the keys are laid out anew; of
        a row that is cut over ranks, its part says who sees whom.
        """
        mask: Tensor | None = None
        packed = self._attention not in ("sdpa", "eager")
        if row.part is not None:
            options["context_part"] = row.part
        elif row.tree is not None and packed:
            seen = row.tree.seen
            options |= {
                "cu_seq_lens_q": seen.cu_queries,
                "cu_seq_lens_k": seen.cu_keys,
                "seen": seen.index_U,
                "longest": as_length(seen.longest_query, seen.cu_queries),
                "longest_key": as_length(seen.longest_key, seen.cu_keys),
            }
        elif row.tree is not None:
            mask = row.tree.mask()
            if self._attention == "eager":  # it adds its mask
                dtype = computes_in(self.model)
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        elif self._attention == VARLEN:
            options |= {"cu_seq_lens_q": row.cu_seqlens_S, "longest": as_length(row.longest, row.cu_seqlens_S)}
        elif packed:
            options |= {
                "cu_seq_lens_q": row.cu_seqlens_S,
                "cu_seq_lens_k": row.cu_seqlens_S,
                "max_length_q": row.longest,
                "max_length_k": row.longest,
            }
        return module(
            input_ids=row.input_ids_T[None],
            position_ids=row.position_ids_T[None],
            attention_mask=mask,
            use_cache=False,
            **options,
        )


@torch.no_grad()
def find_head(model: Any) -> Head | None:
    """The head of `model` if it is a product, with a scale and a soft cap at most, that gives the model's own logits."""
    found = _named_head(model)
    if found is None:
        return None
    device, vocabulary = found.output.weight.device, rows_of(found.output.weight)
    ids_1T = (torch.arange(_PROBE_TOKENS, device=device) * 7919 % vocabulary)[None]
    own_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float()
    targets_T, ones_T = own_TV.argmax(-1), torch.ones(_PROBE_TOKENS, device=device)

    def in_parts() -> Tensor:
        hidden_TH = found.backbone(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
        return found.logprobs(hidden_TH, targets_T, ones_T)[0]

    logprobs_T = as_forward(model, in_parts)
    wanted_T = torch.log_softmax(own_TV, -1).gather(-1, targets_T[:, None])[:, 0]
    gap = float((logprobs_T - wanted_T).abs().max() / own_TV.abs().max().clamp_min(1.0))
    if gap > _MOST_GAP.get(computes_in(model), 1e-4):
        _log.info("the head of %s is no plain product (gap %.2g); its logits are computed whole", type(model).__name__, gap)
        return None
    return found


@torch.no_grad()
def refuse_mixed_samples(scorer: Scorer) -> None:
    """Raise ModelError unless the model keeps the samples of a row apart, tried on a row of two.

    Not every architecture of transformers reads positions that restart as a new sample: some attend across, some carry a
    state over. Training on such rows would go wrong without a sign.
    """
    model = scorer.model
    device, vocab = next(model.parameters()).device, rows_of(model.get_input_embeddings().weight)
    ids_T = torch.arange(2 * _PROBE_TOKENS, device=device) % vocab

    def after_its_first_token(changed: int | None) -> Tensor:
        """Log-probabilities of the second sample's tokens from its third on: none of them is changed itself."""
        ids = ids_T.clone()
        if changed is not None:
            ids[changed] = (ids[changed] + vocab // 2) % vocab
        return scorer(_two_samples(ids))[0]

    plain = after_its_first_token(None)
    leak = (after_its_first_token(_PROBE_TOKENS - 1) - plain).abs().max()
    own = (after_its_first_token(_PROBE_TOKENS) - plain).abs().max()
    if leak > _MOST_LEAK * own:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ModelError(
            f"models of type {kind} let the samples of a packed row see each other (they ignore position_ids that restart), so "
            "training on them would be wrong; choose a model of another architecture, such as Llama, Mistral or Qwen3"
        )


def _two_samples(ids_T: Tensor) -> RowTensors:
    """A row of two samples of equal length that is scored from the third token of the second on."""
    half = len(ids_T) // 2
    scored = torch.arange(half + 2, 2 * half, device=ids_T.device)
    ones, zeros = torch.ones(len(scored), device=ids_T.device), torch.zeros(len(scored), device=ids_T.device)
    return RowTensors(
        input_ids_T=ids_T,
        position_ids_T=torch.arange(half, device=ids_T.device).repeat(2),
        cu_seqlens_S=torch.tensor([0, half, 2 * half], dtype=torch.int32, device=ids_T.device),
        longest=half,
        predicting_N=scored - 1,
        targets_N=ids_T[scored],
        temperature_N=ones,
        advantages_N=zeros,
        engine_logprobs_N=zeros,
        trajectory_index_N=zeros.long(),
        turn_index_N=zeros.long(),
    )


def _named_head(model: Any) -> Head | None:
    """What transformers calls the parts of the model; None where it has no such parts."""
    output, backbone = model.get_output_embeddings(), getattr(model, model.base_model_prefix, None)
    if not isinstance(output, torch.nn.Linear) or backbone is None or backbone is model:
        return None
    config = model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    shape = HeadShape(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
    return Head(backbone=backbone, output=output, shape=shape)


def _of_logits(logits_NV: Tensor, row: RowTensors) -> tuple[Tensor, Tensor]:
    logprobs_NV = torch.log_softmax(logits_NV.float() / row.temperature_N[:, None], dim=-1)
    with torch.no_grad():
        # Where a logit is -inf its probability is 0, and 0 x inf would be nan.
        entropy_N = -torch.where(logprobs_NV > float("-inf"), logprobs_NV.exp() * logprobs_NV, 0.0).sum(-1)
    return logprobs_NV.gather(-1, row.targets_N[:, None])[:, 0], entropy_N
