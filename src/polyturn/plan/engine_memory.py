"""What an engine takes of its GPU, term by term: the `hf` engine, and an engine that pages its KV cache.

A paged engine takes a share of the GPU when it starts and keeps it: weights, the peak of a trial batch, what other libraries
took, and the rest as blocks of KV cache. Its formulas were worked out from one published start of vLLM and give it back:
Qwen2.5-7B on an A100 of 40 GB at a share of 0.85, which reports 33.57 GiB = 14.27 weights + 17.39 activation peak + 0.09 others
+ 1.82 KV cache, 2,131 blocks of 16 tokens. Four starts of vLLM 0.26 on an H200 were held against them (`docs/planner.md`). With
tensor parallelism each GPU holds its part of every matrix, and of the heads' keys and values; norms, hidden states and MLA's
latents are whole on each of them.

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
DOUBT = round(0.14 * (1 << 30))
"""By how much starts differ in that: 0.225 GiB on an H200 with vLLM 0.26. A context that has no room after this is refused."""
_PAGE = 2 << 20
_SMALLEST_PAGED = 10 << 20
_MOST_UNSPLIT = 1 << 20
_WORKSPACE = 8_519_680
"""Of cuBLAS on cards before Hopper, bytes."""
_INPUTS = 24
"""Bytes of a token's id, position and slot."""
GRAPHS = round(0.5 * (1 << 30))
"""What recorded CUDA graphs take: assumed, not measured."""
_VOCABULARY_PADDING = 64
_SAMPLER_COPIES = 4
"""Float32 copies of a batch's logits that sampling makes in a model with experts, which vLLM runs by its older way: assumed.
Dense ones are sampled where their logits lie: 1,024 sequences of Qwen3-1.7B took no more than those."""


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
        """Tokens that the cache holds."""
        return self.blocks * BLOCK_TOKENS

    @property
    def longest(self) -> int:
        """Tokens of the longest context that can be served, also by a start that takes more than most."""
        return max(0, int((self.kv_bytes - DOUBT) // (self.bytes_per_token * BLOCK_TOKENS)) * BLOCK_TOKENS)

    def sequences(self, context: int) -> int:
        """Sequences of that length that fit at once."""
        return self.blocks // math.ceil(context / BLOCK_TOKENS)

    @property
    def at_least(self) -> float:
        """Bytes without any cache."""
        return sum(term.bytes for term in self.terms)

    @property
    def weights(self) -> float:
        """Bytes of its part of the weights."""
        return sum(term.bytes for term in self.terms if term.name == "engine weights")

    @property
    def asleep(self) -> float:
        """Bytes that stay when weights, cache and work are given back: graphs, and what is outside PyTorch."""
        return sum(term.bytes for term in self.terms if term.name in ("engine non-torch", "CUDA graphs"))

    def refusal(self, context: int) -> str | None:
        """Why a context of so many tokens can't be served, and what can; None when it can."""
        if context <= self.longest:
            return None
        if self.longest == 0:
            return (
                f"weights and activations leave no room for a KV cache in {self.budget / (1 << 30):.2f} GiB; take a larger GPU"
            )
        return (
            f"a context of {context:,} tokens needs {context * self.bytes_per_token / (1 << 30):.2f} GiB of KV cache and "
            f"{self.kv_bytes / (1 << 30):.2f} are left, which is {self.tokens:,} tokens; starts differ by "
            f"{DOUBT / (1 << 30):.2f}, so ask for at most {self.longest:,}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLoad:
    """What a paged engine is asked for."""

    context: int
    """Longest prompt and completion together."""
    batched_tokens: int | None = None
    """Tokens of its trial batch: what one forward pass may hold; the whole `context` where prompts are not cut into chunks."""
    sequences: int | None = None
    """Requests of a batch, whose logits it samples from; None leaves the sampler out."""
    tensor_parallel: int = 1
    """GPUs that share the weights."""
    dtype: str = "bfloat16"
    graphs: bool = False
    """Whether it records CUDA graphs."""
    adapters: float = 0
    """Parameters of adapters beside the weights."""


def paged_engine(facts: ModelFacts, load: PagedLoad, *, budget: float) -> PagedEngine:
    """Memory of a paged engine on each of its GPUs, of which it may take `budget` bytes.

    Raises ConfigError for lengths below 1.
    """
    if load.context < 1 or (load.batched_tokens is not None and load.batched_tokens < 1):
        raise ConfigError(f"context={load.context}, batched tokens={load.batched_tokens}: give whole numbers above 0")
    terms = _paged_terms(facts, load)
    left = budget - sum(term.bytes for term in terms)
    per_token = kv_bytes_on_a_gpu(facts, load)
    return PagedEngine(
        budget=budget,
        terms=terms,
        kv_bytes=left,
        bytes_per_token=per_token,
        blocks=max(0, int(left // (per_token * BLOCK_TOKENS))),
    )


def budget_of(share: float, usable_bytes: float) -> float:
    """Bytes that an engine may take which gets `share` of a GPU. Raises ConfigError for a share that is none."""
    if not 0 < share <= 1:
        raise ConfigError(
            f"an engine can't take a share of {share:g} of a GPU; give a number above 0 and at most 1, such as 0.85"
        )
    return share * usable_bytes


def kv_bytes_on_a_gpu(facts: ModelFacts, load: PagedLoad) -> int:
    """Bytes of a token in the cache of one GPU: its part of the heads, of which each GPU has at least one."""
    whole = facts.kv_bytes_per_token(ELEMENT_BYTES[load.dtype], latent=True)
    if facts.latent_numbers is not None:
        return whole
    return whole * math.ceil(facts.kv_heads / load.tensor_parallel) // facts.kv_heads


def _paged_terms(facts: ModelFacts, load: PagedLoad) -> tuple[Term, ...]:
    """All but the cache."""
    width, parts = ELEMENT_BYTES[load.dtype], load.tensor_parallel
    batch = load.context if load.batched_tokens is None else load.batched_tokens
    forward = batch * (width * (4 * facts.hidden + 3 * facts.intermediate / parts) + _INPUTS) + _WORKSPACE
    rows = load.sequences or 0
    copies = _SAMPLER_COPIES if facts.experts_per_token else 0
    sampled = batch * width * facts.hidden + rows * facts.vocabulary * (width + 4 * copies)
    each = f" / {parts} GPUs" if parts > 1 else ""
    terms = [
        Term(
            name="engine weights",
            bytes=_served_weights(facts, width, parts),
            formula=f"{facts.parameters:,} parameters x {width} bytes{each}, in pages, and the table of positions",
        ),
        Term(
            name="engine activations",
            bytes=max(forward, sampled),
            formula=f"peak of a trial batch of {batch:,} tokens: 4 x hidden + 3 x feed-forward width{each}, x {width} bytes"
            if forward >= sampled
            else f"peak of sampling {rows:,} rows of logits x ({width} bytes + {copies} float32 copies), and hidden states",
        ),
        Term(
            name="engine non-torch",
            bytes=NON_TORCH,
            formula="what CUDA and NCCL take outside PyTorch, as one start reported it",
        ),
    ]
    if load.graphs:
        terms.append(Term(name="CUDA graphs", bytes=GRAPHS, formula="recorded batches, assumed"))
    if load.adapters:
        terms.append(
            Term(name="engine adapters", bytes=2 * load.adapters * width, formula=f"parameters x {width} bytes, two slots")
        )
    return tuple(terms)


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


def _served_weights(facts: ModelFacts, width: int, parts: int) -> float:
    """Weights as each of `parts` GPUs holds them: fused matrices, in the allocator's pages, and the table of positions."""
    vocabulary = facts.vocabulary if parts == 1 else _up(facts.vocabulary, _VOCABULARY_PADDING * parts) // parts
    matrix = _paged(vocabulary * facts.hidden * width)
    total = float(matrix * (2 if facts.head else 1))
    for numel, count in _fused(facts, parts):
        total += _paged(numel * width) * count
    total += sum(length * count for length, count in facts.norms) * width
    total += sum(linear.outputs / parts * linear.count for linear in facts.linears if linear.bias) * width
    return total + (facts.max_positions or 0) * facts.head_dim * width


def _fused(facts: ModelFacts, parts: int) -> list[tuple[int, int]]:
    """Sizes of a GPU's part of the matrices: query, key and value are one, gate and up are one."""
    fused: dict[tuple[str, int], list[Linear]] = {}
    for linear in facts.linears:
        group = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv"}.get(
            linear.name, linear.name.replace("up_proj", "gate_proj")
        )
        fused.setdefault((group, linear.inputs * linear.count), []).append(linear)
    return [(sum(_part(facts, linear, parts) for linear in group), group[0].count) for group in fused.values()]


def _part(facts: ModelFacts, linear: Linear, parts: int) -> int:
    """Numbers of a matrix on one GPU. A head of keys or values is whole on every GPU that needs it."""
    outputs = linear.outputs
    if linear.name in ("k_proj", "v_proj"):
        return linear.inputs * outputs * math.ceil(facts.kv_heads / parts) // facts.kv_heads
    return linear.inputs * outputs if linear.name == "router" else math.ceil(linear.inputs * outputs / parts)


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _paged(size: int) -> int:
    """Bytes that PyTorch's allocator counts for a large block: whole pages, unless what is left over can serve others."""
    if size < _SMALLEST_PAGED:
        return size
    whole = math.ceil(size / _PAGE) * _PAGE
    return whole if whole - size <= _MOST_UNSPLIT else size
