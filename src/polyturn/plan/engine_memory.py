"""What an engine takes of its GPU, term by term: the `hf` engine, and an engine that pages its KV cache.

A paged engine takes a share of the GPU when it starts and keeps it: weights, the peak of a trial batch, what other libraries
took, and the rest as blocks of KV cache. Its formulas were worked out from one published start of vLLM and give it back, which
says little about other models: Qwen2.5-7B on an A100 of 40 GB at a share of 0.85, which reports 33.57 GiB = 14.27 weights +
17.39 activation peak + 0.09 others + 1.82 KV cache, 2,131 blocks of 16 tokens. Recipes can't ask for such an engine yet.

The `hf` engine holds its weights and takes the rest while it generates. Its formulas count what its code makes; they were not
held against a measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyturn.config.memory import ELEMENT_BYTES
from polyturn.errors import ConfigError
from polyturn.plan.memory import Term, TrainerLoad, adapter_numbers
from polyturn.plan.models import Linear, ModelFacts

BLOCK_TOKENS = 16
NON_TORCH = round(0.09 * (1 << 30))
"""What CUDA and NCCL take outside PyTorch on one GPU, as that start reports it."""
_PAGE = 2 << 20
_SMALLEST_PAGED = 10 << 20
_MOST_UNSPLIT = 1 << 20
_WORKSPACE = 8_519_680
"""Of cuBLAS on cards before Hopper, bytes."""
_INPUTS = 24
"""Bytes of a token's id, position and slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedEngine:
    """Memory of a paged engine on one GPU, and the tokens that its cache holds."""

    budget: float
    """Bytes it may take."""
    terms: tuple[Term, ...]
    """Without the cache."""
    kv_bytes: float
    """Left for the cache; below 0 when there is not even room for the rest."""
    bytes_per_token: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds, which is also the longest context that can be served."""
        return self.blocks * BLOCK_TOKENS

    def sequences(self, context: int) -> int:
        """Sequences of that length that fit at once."""
        return self.blocks // math.ceil(context / BLOCK_TOKENS)

    def refusal(self, context: int) -> str | None:
        """Why a context of so many tokens can't be served, and what can; None when it can."""
        if context <= self.tokens:
            return None
        if self.tokens == 0:
            return (
                f"weights and activations leave no room for a KV cache in {self.budget / (1 << 30):.2f} GiB; take a larger GPU"
            )
        return (
            f"a context of {context:,} tokens needs {context * self.bytes_per_token / (1 << 30):.2f} GiB of KV cache and "
            f"{self.kv_bytes / (1 << 30):.2f} are left; the longest that fits is {self.tokens:,}"
        )


def paged_engine(
    facts: ModelFacts,
    *,
    usable_bytes: int,
    share: float,
    context: int,
    batched_tokens: int | None = None,
    dtype: str = "bfloat16",
) -> PagedEngine:
    """Memory of a paged engine on one GPU of `usable_bytes`, of which it may take `share`.

    `batched_tokens` is the size of its trial batch: what one forward pass may hold, the whole `context` where it does not cut
    prompts into chunks. Raises ConfigError for a share or a length that is none.
    """
    if not 0 < share <= 1:
        raise ConfigError(
            f"an engine can't take a share of {share:g} of a GPU; give a number above 0 and at most 1, such as 0.85"
        )
    if context < 1 or (batched_tokens is not None and batched_tokens < 1):
        raise ConfigError(f"context={context}, batched tokens={batched_tokens}: give whole numbers above 0")
    width = ELEMENT_BYTES[dtype]
    batch = context if batched_tokens is None else batched_tokens
    terms = (
        Term(
            name="weights",
            bytes=_served_weights(facts, width),
            formula=f"{facts.parameters:,} parameters x {width} bytes, in the allocator's pages, and the table of positions",
        ),
        Term(
            name="activation peak",
            bytes=batch * (width * (4 * facts.hidden + 3 * facts.intermediate) + _INPUTS) + _WORKSPACE,
            formula=f"4 x hidden + 3 x feed-forward width for {batch:,} tokens of a trial batch",
        ),
        Term(name="non-torch", bytes=NON_TORCH, formula="what CUDA takes outside PyTorch"),
    )
    budget = share * usable_bytes
    left = budget - sum(term.bytes for term in terms)
    per_token = facts.kv_bytes_per_token(width, latent=True)
    return PagedEngine(
        budget=budget,
        terms=terms,
        kv_bytes=left,
        bytes_per_token=per_token,
        blocks=max(0, int(left // (per_token * BLOCK_TOKENS))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HfLoad:
    """What an `hf` engine is asked for."""

    dtype: str
    sequences: int
    """Requests of a batch, at most."""
    context: int
    """Longest trajectory."""


def hf_terms(facts: ModelFacts, load: HfLoad, *, shares_base: TrainerLoad | None = None) -> tuple[Term, ...]:
    """What an `hf` engine takes: weights always, the rest while it generates; the worst case, all sequences at full length.

    `shares_base` is the trainer of the same process where its frozen weights are the engine's too (adapters).
    """
    width = ELEMENT_BYTES[load.dtype]
    sequences, context = load.sequences, load.context
    tokens = sequences * context
    kept = tokens * facts.kv_bytes_per_token(width)
    if shares_base is None:
        weights, whose = facts.parameters * width, f"{facts.parameters:,} parameters x {width} bytes, a copy of its own"
    else:
        weights = adapter_numbers(facts, shares_base) * width
        whose = "adapters; the frozen weights are the trainer's"
    rows = f"{sequences:,} sequences x {context:,} tokens"
    return (
        Term(name="engine weights", bytes=weights, formula=whose),
        Term(
            name="KV cache",
            bytes=kept * (1 + 1 / facts.layers),
            formula=f"{rows} x {facts.kv_bytes_per_token(width):,} bytes, one layer twice while it grows",
            phase="generating",
        ),
        Term(
            name="prefill",
            bytes=tokens * width * (4 * facts.hidden + 3 * facts.intermediate),
            formula=f"{rows} x (4 x hidden + 3 x feed-forward width) x {width} bytes",
            phase="generating",
        ),
        Term(name="attention mask", bytes=tokens * context, formula=f"{rows} x {context:,}, a byte each", phase="generating"),
        Term(
            name="logits",
            bytes=sequences * facts.vocabulary * (width + 4 * 4),
            formula=f"{sequences:,} x vocabulary, and four float32 copies to sample from (assumed)",
            phase="generating",
        ),
    )


def _served_weights(facts: ModelFacts, width: int) -> float:
    """Weights as an engine holds them: fused matrices, each rounded up to the allocator's pages, and the table of positions."""
    total = float(_paged(facts.embedding * width)) + (_paged(facts.head * width) if facts.head else 0)
    for numel, count in _fused(facts):
        total += _paged(numel * width) * count
    total += (
        sum(length * count for length, count in facts.other_tensors() if length not in (facts.embedding, facts.head)) * width
    )
    return total + (facts.max_positions or 0) * facts.head_dim * width


def _fused(facts: ModelFacts) -> list[tuple[int, int]]:
    """Sizes of the matrices: query, key and value are one, gate and up are one."""
    fused: dict[tuple[str, int], list[Linear]] = {}
    for linear in facts.linears:
        group = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv"}.get(
            linear.name, linear.name.replace("up_proj", "gate_proj")
        )
        fused.setdefault((group, linear.inputs * linear.count), []).append(linear)
    return [(sum(part.inputs * part.outputs for part in parts), parts[0].count) for parts in fused.values()]


def _paged(size: int) -> int:
    """Bytes that PyTorch's allocator counts for a large block: whole pages, unless what is left over can serve others."""
    if size < _SMALLEST_PAGED:
        return size
    whole = math.ceil(size / _PAGE) * _PAGE
    return whole if whole - size <= _MOST_UNSPLIT else size
