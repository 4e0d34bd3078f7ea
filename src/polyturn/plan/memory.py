"""What a rank of the trainer takes of its GPU, term by term, each with its formula in words.

Weights, gradients, master weights and the optimizer's state are exact (`polyturn.config.memory`). Activations are a formula
of what a decoder layer keeps for its backward pass, in numbers a token, with h hidden size, a attention width (heads x head
size), k width of the keys, i width of the feed-forward part:

    keep, compiled     4h + 2a + 5k + 3i
    keep, eager        8h + 2a + 5k + 4i
    selective          2h + 2a + 2k + 2i, and one layer whole while it is computed again
    full               h, and one layer whole while it is computed again

Attention with a mask repeats keys and values for all query heads, which is 2a more. Selective is what its rule keeps:
products, attention and what comes into the layer. The shares of h, a and k in the two others were fitted to the peaks that
`benchmarks/trainer_throughput.py` measured on an H200 (dense Qwen2 layers, models of 0.1 to 7 billion parameters, bfloat16,
rows of 16,384 tokens; one eager case, one with adapters), and rounded to whole numbers. A test holds every case against its
peak; since they are the ones it was fitted to, that says how well the form fits, not how well it foretells others. Not
measured: float32, attention of another width than h, experts, latent attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

from polyturn.config.memory import (
    ELEMENT_BYTES,
    Held,
    MasterWeights,
    OptimizerName,
    Placed,
    Quantize,
    adapter_parameters,
    frozen_tensor,
    trained_tensor,
)
from polyturn.errors import ModelError, nearest
from polyturn.plan.models import Linear, ModelFacts

Phase: TypeAlias = Literal["always", "training", "scoring", "generating"]

HEAD_CHUNK = 1 << 30
"""Float32 logits of one chunk of the head, as the trainer cuts them on a GPU."""
CONTEXT = round(0.75 * (1 << 30))
"""CUDA's context and loaded kernels: 0.74 GiB on an H200 (`benchmarks/planner_gpu.py`)."""
GAPS = 0.1
"""Share of what comes and goes that the allocator can't use for others; 1.3 GiB beside 13, and 4.2 beside 51, were measured."""
_GAPPED = ("activations", "head, one chunk", "head, gradient")
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Bytes of one thing on one GPU, and how they come about."""

    name: str
    bytes: float
    formula: str
    phase: Phase = "always"
    """When they are taken; phases come one after the other and share their memory."""


def peak(terms: Iterable[Term]) -> float:
    """Bytes at the worst moment: what is there always, and the largest of the phases."""
    sums: dict[Phase, float] = {}
    for term in terms:
        sums[term.phase] = sums.get(term.phase, 0) + term.bytes
    return sums.pop("always", 0) + max(sums.values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLoad:
    """How a rank trains: the settings of a resolved recipe that decide about memory."""

    dtype: str
    row_tokens: int
    """Of a row, or of this rank's part of it."""
    trained_tokens: int
    """Those under the loss, at most."""
    rows: int
    """Rows of an optimizer step on this rank; several find the gradients of the first one there."""
    optimizer: OptimizerName = "adamw"
    master_weights: MasterWeights = "none"
    offload: bool = False
    activations: Literal["keep", "selective", "full"] = "keep"
    compiled: bool = True
    float32_head: bool = False
    masked: bool = False
    """Attention of packed rows needs a mask, as it does of float32 weights."""
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] | None = None
    quantize: Quantize | None = None
    reference: Literal["none", "same", "cpu"] = "none"
    """Where a frozen copy of whole weights waits; `none` also with adapters, whose reference is the policy itself."""
    shards: int = 1
    """Ranks that one copy of the weights is cut over."""
    context_ranks: int = 1
    """Ranks that each row is cut over."""
    tensor_ranks: int = 1
    """Ranks that each layer is cut over, beside `shards`."""
    sync_every_row: bool = False
    """Of shards: no whole gradients are held between rows."""
    copies_beside: bool = False
    """Of shards: float32 copies lie beside the weights, whatever those are, as DeepSpeed keeps them."""
    state_ranks: int = 1
    """Ranks that the optimizer's state is cut over, masters among it, where weights and gradients are not."""
    layers_alone: bool = False
    """Of cut layers: nothing else is cut, so that there are no shards to gather."""


def trainer_terms(facts: ModelFacts, load: TrainerLoad) -> tuple[Term, ...]:
    """What one rank takes of its GPU, without CUDA's context and the allocator's gaps. Raises ModelError for wrong targets."""
    held, width = held_bytes(facts, load), ELEMENT_BYTES[load.dtype]
    device = held.device
    kept, again = _activations(facts, load)
    chunk, head_gradient = _head(facts, load)
    # The backward pass begins with the head; a layer is computed again once the head is done.
    late = max(chunk.bytes + head_gradient.bytes, again)
    work = kept + late
    gradients = device.gradients if load.rows > 1 else max(0.0, device.gradients - work)
    trained = "trained weights" if load.lora_rank is None else "adapters"
    # SDPA turns truth values into numbers layer by layer, and its backward pass wants them again.
    masks = facts.layers if load.activations == "keep" else 1
    over = f", over {load.state_ranks} ranks" if load.state_ranks > 1 else ""
    terms = [
        Term(name="weights", bytes=device.weights, formula=_weights_formula(facts, load)),
        Term(name="master weights", bytes=device.master, formula=f"{_master_words(load)} for each of the {trained}{over}"),
        Term(name="optimizer state", bytes=device.optimizer_state, formula=f"{load.optimizer}{over}, see docs/memory.md"),
        Term(
            name="gradients",
            bytes=gradients,
            formula=f"of the {trained}, from the first row of a step on" if load.rows > 1 else "one row: as activations go",
            phase="training",
        ),
        Term(name="activations", bytes=kept, formula=_activations_formula(load), phase="training"),
        Term(
            name="attention mask",
            bytes=load.row_tokens**2 * load.context_ranks * (1 + width * masks) if load.masked else 0,
            formula="tokens of a row squared, as truth values, and as numbers in "
            + ("every layer" if masks > 1 else "the layer that computes")
            + (f", on {load.context_ranks} ranks" if load.context_ranks > 1 else ""),
            phase="training",
        ),
        _whole_keys(facts, load),
        chunk,
        head_gradient,
        Term(
            name="one layer again",
            bytes=late - chunk.bytes - head_gradient.bytes,
            formula="what a recomputed layer takes beyond the head, which is done by then",
            phase="training",
        ),
        Term(
            name="KL reference",
            bytes=0 if load.reference == "none" else _one_rank_s(facts, load) * width / load.shards,
            formula=f"a frozen copy of the weights, {'while it scores' if load.reference == 'cpu' else 'always'}",
            phase="scoring" if load.reference == "cpu" else "always",
        ),
    ]
    if _is_sharded(load):
        terms += _together(facts, load)
    return tuple(term for term in terms if term.bytes > 0)


def _is_sharded(load: TrainerLoad) -> bool:
    return load.shards > 1 or (load.tensor_ranks > 1 and not load.layers_alone)


def _one_rank_s(facts: ModelFacts, load: TrainerLoad) -> float:
    """Weights without shards: those of the layers are cut over the ranks that compute a layer together."""
    return facts.parameters - facts.layer_weights * (1 - 1 / load.tensor_ranks)


def _whole_keys(facts: ModelFacts, load: TrainerLoad) -> Term:
    """What a rank holds of the keys and values of the ranks that it shares a row with."""
    width, layers = ELEMENT_BYTES[load.dtype], facts.layers if load.activations == "keep" else 1
    one_layer = load.row_tokens * (load.context_ranks - 1) * facts.kv_numbers / facts.layers
    return Term(
        name="keys and values of other ranks",
        bytes=one_layer * (width * layers + width + _FLOAT32),
        formula=f"of {'every layer' if layers > 1 else 'the layer that computes'}, and their gradients in one layer",
        phase="training",
    )


def _together(facts: ModelFacts, load: TrainerLoad) -> list[Term]:
    """What a rank with shards holds whole for a while: embedding and head, two layers, and gradients."""
    width = ELEMENT_BYTES[load.dtype]
    ends, layer = facts.embedding + facts.head, facts.layer_weights / facts.layers / load.tensor_ranks
    trained = adapter_numbers(facts, load) or _one_rank_s(facts, load)
    several = load.rows > 1 and not load.sync_every_row
    share = trained / facts.parameters
    return [
        Term(
            name="gathered weights",
            bytes=width * (ends + 2 * layer),
            formula="embedding and head, the layer that computes and the next one",
            phase="training",
        ),
        Term(
            name="whole gradients",
            bytes=_FLOAT32 * (trained if several else share * (ends + layer)),
            formula="float32, added up until the last row of a step; trainer.sync_every_row=true holds a layer's"
            if several
            else "float32, of embedding, head and a layer until they are summed over the ranks",
            phase="training",
        ),
    ]


def own_terms(terms: Iterable[Term], processes: int = 1) -> tuple[Term, ...]:
    """What CUDA and its allocator take besides `terms`, with so many processes on the GPU."""
    each = f" of each of {processes} processes" if processes > 1 else ""
    context = Term(name="CUDA context", bytes=processes * CONTEXT, formula=f"context and kernels{each}")
    work = sum(term.bytes for term in terms if term.name in _GAPPED)
    gaps = Term(name="allocator's gaps", bytes=GAPS * work, formula=f"{GAPS:.0%} of activations and head", phase="training")
    return (context, gaps) if work else (context,)


@lru_cache(maxsize=1024)  # hundreds of plans are compared, which differ in where things are and not in what they hold
def held_bytes(facts: ModelFacts, load: TrainerLoad) -> Placed:
    """Weights, gradients, masters and state, on the GPU and in CPU memory, tensor by tensor. Raises ModelError."""
    total = Placed(device=Held())
    for placed, count in _tensors(facts, load):
        total += Placed(device=_times(placed.device, count), cpu=_times(placed.cpu, count))
    return total if load.state_ranks == 1 else _state_cut(total, facts, load)


def _state_cut(total: Placed, facts: ModelFacts, load: TrainerLoad) -> Placed:
    """With a part of the optimizer's state: rows that a rank steps are copies, in float32 where there are masters."""
    device, trained = total.device, adapter_numbers(facts, load) or facts.parameters
    stepped = device.master or trained * ELEMENT_BYTES[load.dtype]
    cut = {"master": stepped // load.state_ranks, "optimizer_state": device.optimizer_state // load.state_ranks}
    return replace(total, device=replace(device, **cut))


def adapted(facts: ModelFacts, targets: tuple[str, ...] | None) -> list[Linear]:
    """The linear layers that get adapters. Raises ModelError for a target that is none."""
    places = [linear for linear in facts.linears if not linear.expert]
    for target in targets or ():
        if target not in {linear.name for linear in places}:
            names = {linear.name for linear in places}
            raise ModelError(f"model.lora.targets: {target} is no linear layer of {facts.name}; {nearest(target, names)}")
    return [linear for linear in places if targets is None or linear.name in targets]


def adapter_numbers(facts: ModelFacts, load: TrainerLoad) -> int:
    """Parameters of all adapters, 0 without them. Raises ModelError."""
    if load.lora_rank is None:
        return 0
    return sum(
        linear.count * adapter_parameters(linear.inputs, linear.outputs, load.lora_rank)
        for linear in adapted(facts, load.lora_targets)
    )


def _tensors(facts: ModelFacts, load: TrainerLoad) -> Iterator[tuple[Placed, int]]:
    """Bytes of every tensor, with the number of its like."""

    def part(numel: int, rows: int, ranks: int = load.shards) -> int:
        """Of the rank with the most: tensors are cut along their first dimension."""
        return numel if ranks == 1 else math.ceil(rows / ranks) * (numel // rows)

    # Shards with masters are float32 themselves, and have no weights of another type beside them.
    masters_alone = _is_sharded(load) and load.master_weights == "float32" and not load.copies_beside
    dtype = "float32" if masters_alone else load.dtype
    master_weights: MasterWeights = "none" if masters_alone else "float32" if load.copies_beside else load.master_weights

    def trained(numel: int) -> Placed:
        return trained_tensor(numel, dtype=dtype, optimizer=load.optimizer, master_weights=master_weights, offload=load.offload)

    if _is_sharded(load):
        yield from _shards(facts, load, part, trained)
        return
    matrices = ((linear, linear.inputs * linear.outputs // load.tensor_ranks) for linear in facts.linears)
    if load.lora_rank is None:
        yield from ((trained(numel), linear.count) for linear, numel in matrices)
        yield from ((trained(numel), count) for numel, count in facts.other_tensors())
        return
    for linear, numel in matrices:
        bits = None if linear.expert else load.quantize
        yield frozen_tensor(numel, dtype=load.dtype, quantize=bits, rows=linear.outputs), linear.count
    yield from ((frozen_tensor(numel, dtype=load.dtype), count) for numel, count in facts.other_tensors())
    for linear in adapted(facts, load.lora_targets):
        yield trained(adapter_parameters(linear.inputs, 0, load.lora_rank)), linear.count
        yield trained(adapter_parameters(0, linear.outputs, load.lora_rank)), linear.count


def _shards(
    facts: ModelFacts, load: TrainerLoad, part: Callable[..., int], trained: Callable[[int], Placed]
) -> Iterator[tuple[Placed, int]]:
    """Bytes of this rank's part of every tensor, with the number of its like."""

    def base(numel: int) -> Placed:
        return trained(numel) if load.lora_rank is None else frozen_tensor(numel, dtype=load.dtype)

    for linear in facts.linears:
        yield base(part(linear.inputs * linear.outputs, linear.outputs, load.shards * load.tensor_ranks)), linear.count
    for numel, count in facts.other_tensors():
        yield base(part(numel, facts.vocabulary if numel == facts.embedding else numel)), count
    rank = load.lora_rank
    if rank is None:
        return
    for linear in adapted(facts, load.lora_targets):
        yield trained(part(rank * linear.inputs, rank)), linear.count
        yield trained(part(rank * linear.outputs, linear.outputs)), linear.count


def _activations(facts: ModelFacts, load: TrainerLoad) -> tuple[float, float]:
    """Bytes that all layers keep of a row, and those of one layer that is computed again."""
    width = ELEMENT_BYTES[load.dtype]
    hidden, attention = facts.hidden, facts.heads * facts.head_dim / load.tensor_ranks
    keys = facts.kv_numbers / facts.layers / 2 / load.tensor_ranks
    feed_forward = facts.intermediate / load.tensor_ranks
    # An expert gets a copy of the tokens that are its own, and gives back as many.
    routed = 2 * facts.experts_per_token * hidden
    whole = routed + 5 * keys + (4 if load.masked else 2) * attention
    whole += 4 * hidden + 3 * feed_forward if load.compiled else 8 * hidden + 4 * feed_forward
    inside_adapters = 0 if load.lora_rank is None else load.lora_rank * len(adapted(facts, load.lora_targets))
    whole += inside_adapters
    kept = {
        "keep": whole,
        "selective": 2 * hidden + 2 * attention + 2 * keys + 2 * feed_forward + routed + inside_adapters,
        "full": float(hidden),
    }[load.activations]
    again = 0 if load.activations == "keep" else whole
    # The last hidden states, those of the trained tokens, and their gradient.
    ends = load.row_tokens * hidden + 2 * load.trained_tokens * hidden
    return width * (load.row_tokens * facts.layers * kept + ends), width * load.row_tokens * again


def _head(facts: ModelFacts, load: TrainerLoad) -> tuple[Term, Term]:
    """The chunked head: logits of a chunk with their gradient, and the gradient of its weight while it is summed up."""
    width = _FLOAT32 if load.float32_head else ELEMENT_BYTES[load.dtype]
    matrix = facts.vocabulary * facts.hidden
    logits = min(HEAD_CHUNK, load.trained_tokens * facts.vocabulary * _FLOAT32)
    copy = _FLOAT32 * matrix if load.float32_head and load.dtype != "float32" else 0
    summed = 0 if load.lora_rank is not None else _FLOAT32 * matrix
    return (
        Term(
            name="head, one chunk",
            bytes=logits * (1 + width / _FLOAT32),
            formula="float32 logits of some tokens, and their gradient",
            phase="training",
        ),
        Term(
            name="head, gradient",
            bytes=summed + copy,
            formula="float32, vocabulary x hidden",
            phase="training",
        ),
    )


def _weights_formula(facts: ModelFacts, load: TrainerLoad) -> str:
    width = ELEMENT_BYTES[load.dtype]
    if _is_sharded(load):
        kind = "float32, which are the masters" if load.master_weights == "float32" else load.dtype
        whose = f"({kind})" if load.lora_rank is None else f"({load.dtype}), and adapters ({kind}),"
        return f"{facts.parameters:,} parameters {whose} on {load.shards * load.tensor_ranks} ranks"
    if load.quantize is not None:
        return f"linear layers in {load.quantize}, the rest x {width} bytes, and adapters"
    if load.tensor_ranks > 1:
        return f"{_one_rank_s(facts, load):,.0f} parameters x {width} bytes, layers cut over {load.tensor_ranks} ranks"
    return f"{facts.parameters:,} parameters x {width} bytes" + (", and adapters" if load.lora_rank is not None else "")


def _master_words(load: TrainerLoad) -> str:
    """What is held of a trained weight besides: a float32 copy, or where only parts are stepped, one of its own type."""
    return f"{_FLOAT32 if load.master_weights == 'float32' else ELEMENT_BYTES[load.dtype]} bytes"


def _activations_formula(load: TrainerLoad) -> str:
    how = {"keep": "all that layers keep", "selective": "products and attention", "full": "what comes into each layer"}
    mode = f"{load.activations}{'' if load.compiled else ', eager'}"
    of = f", which {load.context_ranks} ranks share" if load.context_ranks > 1 else ""
    return f"{how[load.activations]} for {load.row_tokens:,} tokens of a row{of} ({mode})"


def _times(held: Held, count: int) -> Held:
    return Held(
        weights=held.weights * count,
        gradients=held.gradients * count,
        master=held.master * count,
        optimizer_state=held.optimizer_state * count,
    )
