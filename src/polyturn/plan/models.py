"""Facts of a model from its `config.json`: parameters by part, and what a token takes in a KV cache.

The config comes from a local folder, from the hub's cache on this machine, or from a small table of common models; never from
the network. Numbers are counted, not stated by the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyturn.errors import ModelError, nearest
from polyturn.plan.known_models import ALIASES, CONFIGS

_DENSE = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
FAMILIES = (*_DENSE, *_EXPERTS)
"""Values of `model_type` whose layers are known here."""
_LATENT = ("deepseek_v2", "deepseek_v3")
_MOST = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A kind of weight matrix of the decoder, with the number of them in all layers."""

    name: str
    inputs: int
    outputs: int
    count: int
    bias: bool = False
    expert: bool = False
    """One of many of a layer, of which a token passes some; or what picks among them. Neither gets adapters or fewer bits."""

    @property
    def parameters(self) -> int:
        """Of all of them, biases included."""
        return self.count * self.outputs * (self.inputs + self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a decoder-only model. Counts are of numbers, not of bytes."""

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """Embedding and head are one matrix."""
    max_positions: int | None
    intermediate: int
    """Hidden numbers of the feed-forward part that a token passes: of its experts together, of the widest layer."""
    experts_per_token: int
    """0 without experts."""
    linears: tuple[Linear, ...]
    norms: tuple[tuple[int, int], ...]
    """Length and number of the vectors that scale a norm (and of what balances experts)."""
    kv_numbers: int
    """Of one token in all layers, as a cache keeps keys and values of every head that has its own."""
    latent_numbers: int | None
    """Of one token in all layers, as a cache for latent attention (MLA) keeps them; None for other attention."""

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the head that are not the embedding's."""
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def layer_weights(self) -> int:
        """Parameters of the decoder's linear layers, biases included."""
        return sum(linear.parameters for linear in self.linears)

    @property
    def norm_weights(self) -> int:
        """Parameters of the norms."""
        return sum(length * count for length, count in self.norms)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.embedding + self.head + self.layer_weights + self.norm_weights

    def kv_bytes_per_token(self, width: int, *, latent: bool = False) -> int:
        """Bytes of a token in the KV cache, of numbers of `width` bytes; `latent` for an engine that caches MLA's latents."""
        numbers = self.latent_numbers if latent and self.latent_numbers is not None else self.kv_numbers
        return numbers * width

    def other_tensors(self) -> Iterator[tuple[int, int]]:
        """Length and number of all tensors that are no weight of a decoder's linear layer: embedding, head, biases, norms."""
        yield self.embedding, 1
        if self.head:
            yield self.head, 1
        yield from ((linear.outputs, linear.count) for linear in self.linears if linear.bias)
        yield from self.norms


def model_facts(path: str) -> ModelFacts:
    """Facts of what `model.path` names: a folder, a hub id in this machine's cache, or a common model.

    Raises ModelError for what is none of these, and for a config that the planner can't count.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return facts_from_config(_read(folder / "config.json"), name=path)
    cached = _cached_config(path)
    if cached is not None:
        return facts_from_config(_read(cached), name=path)
    key = ALIASES.get(path.lower(), path.lower())
    for name, config in CONFIGS.items():
        if key in (name.lower(), name.partition("/")[2].lower()):
            return facts_from_config(config, name=name)
    names = CONFIGS if "/" in path else [name.partition("/")[2].lower() or name for name in CONFIGS]
    raise ModelError(
        f"model.path={path} is no folder, not in the hub cache of this machine and not among the planner's models; give a "
        f"folder with its config.json (nothing else is read), or one of those: {nearest(path, names)}"
    )


def facts_from_config(config: Mapping[str, Any], *, name: str) -> ModelFacts:
    """Facts of a model with this `config.json`. Raises ModelError for an unknown architecture or a size that is none."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f"{name}: model_type={family} is not among those that the planner counts; {nearest(str(family), FAMILIES)}"
        )
    sizes = _Sizes(config, name)
    hidden, layers, heads = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"]
    kv_heads = sizes.get("num_key_value_heads", heads) or heads
    head_dim = sizes.get("head_dim", 0) or max(1, hidden // heads)
    if family in _LATENT:
        attention, attention_norms, per_token, latent = _latent_attention(sizes, hidden, layers, heads)
    else:
        attention, attention_norms = _attention(config, family, hidden, layers, heads, kv_heads, head_dim)
        per_token, latent = 2 * kv_heads * head_dim, None
    feed_forward, balances, intermediate, chosen = _feed_forward(sizes, family, hidden, layers)
    return ModelFacts(
        name=name,
        family=str(family),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=sizes["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=sizes.get("max_position_embeddings", 0) or None,
        intermediate=intermediate,
        experts_per_token=chosen,
        linears=(*attention, *feed_forward),
        norms=((hidden, 2 * layers + 1), *attention_norms, *balances),
        kv_numbers=layers * per_token,
        latent_numbers=None if latent is None else layers * latent,
    )


class _Sizes:
    """Whole numbers above 0 of a config; whatever else stands there is refused."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def __getitem__(self, key: str) -> int:
        value = self._config.get(key)
        if type(value) is not int or not 0 < value < _MOST:
            raise ModelError(f"{self._name}: config.json has {key}={value!r}; a whole number above 0 is needed, fetch it again")
        return value

    def get(self, key: str, default: int) -> int:
        """0 is a number here: none of them."""
        value = self._config.get(key)
        return default if value is None else 0 if type(value) is int and value == 0 else self[key]

    def whole_layers(self, key: str) -> frozenset[int]:
        """Numbers of layers."""
        value = self._config.get(key) or []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ModelError(f"{self._name}: config.json has {key}={value!r}; a list of layers is needed, fetch it again")
        return frozenset(value)


def _attention(
    config: Mapping[str, Any], family: str, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[list[Linear], list[tuple[int, int]]]:
    """Query, key, value and output, and the norms of queries and keys where there are some."""
    bias, out_bias = family == "qwen2", False
    if family in ("llama", "qwen3", "qwen3_moe", "smollm3"):
        bias = out_bias = bool(config.get("attention_bias", False))
    inner, kv = heads * head_dim, kv_heads * head_dim
    linears = [
        Linear(name="q_proj", inputs=hidden, outputs=inner, count=layers, bias=bias),
        Linear(name="k_proj", inputs=hidden, outputs=kv, count=layers, bias=bias),
        Linear(name="v_proj", inputs=hidden, outputs=kv, count=layers, bias=bias),
        Linear(name="o_proj", inputs=inner, outputs=hidden, count=layers, bias=out_bias),
    ]
    return linears, [(head_dim, 2 * layers)] if family in ("qwen3", "qwen3_moe") else []


def _latent_attention(
    sizes: _Sizes, hidden: int, layers: int, heads: int
) -> tuple[list[Linear], list[tuple[int, int]], int, int]:
    """MLA: its matrices, its norms, and the numbers a token keeps in a layer, spread over the heads and as latents."""
    rank, plain, rotated = sizes["kv_lora_rank"], sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"]
    value, query_rank = sizes["v_head_dim"], sizes.get("q_lora_rank", 0)
    queries = heads * (plain + rotated)
    if query_rank:
        linears = [
            Linear(name="q_a_proj", inputs=hidden, outputs=query_rank, count=layers),
            Linear(name="q_b_proj", inputs=query_rank, outputs=queries, count=layers),
        ]
    else:
        linears = [Linear(name="q_proj", inputs=hidden, outputs=queries, count=layers)]
    linears += [
        Linear(name="kv_a_proj_with_mqa", inputs=hidden, outputs=rank + rotated, count=layers),
        Linear(name="kv_b_proj", inputs=rank, outputs=heads * (plain + value), count=layers),
        Linear(name="o_proj", inputs=heads * value, outputs=hidden, count=layers),
    ]
    norms = [(rank, layers), *([(query_rank, layers)] if query_rank else [])]
    return linears, norms, heads * (plain + rotated + value), rank + rotated


def _feed_forward(sizes: _Sizes, family: str, hidden: int, layers: int) -> tuple[list[Linear], list[tuple[int, int]], int, int]:
    """Matrices, further vectors, the widest layer that a token passes, and how many experts it passes in one."""
    if family in _DENSE:
        width = sizes["intermediate_size"]
        return _gated(hidden, width, layers), [], width, 0
    chosen = sizes["num_experts_per_tok"]
    if family == "mixtral":
        width, experts, shared, dense = sizes["intermediate_size"], sizes["num_local_experts"], 0, 0
    elif family == "qwen3_moe":
        width, experts, shared = sizes["moe_intermediate_size"], sizes["num_experts"], 0
        step, whole = sizes.get("decoder_sparse_step", 1) or 1, sizes.whole_layers("mlp_only_layers")
        dense = sum(index in whole or (index + 1) % step != 0 for index in range(layers))
    else:
        width, experts = sizes["moe_intermediate_size"], sizes["n_routed_experts"]
        shared, dense = sizes.get("n_shared_experts", 0) * width, min(layers, sizes.get("first_k_dense_replace", 0))
    sparse = layers - dense
    linears = _gated(hidden, width, sparse * experts, expert=True)
    linears.append(Linear(name="router", inputs=hidden, outputs=experts, count=sparse, expert=True))
    if shared:
        linears += _gated(hidden, shared, sparse, prefix="shared_")
    if dense:
        linears += _gated(hidden, sizes["intermediate_size"], dense)
    widest = max(chosen * width + shared, sizes["intermediate_size"] if dense else 0)
    return linears, [(experts, sparse)] if family == "deepseek_v3" else [], widest, chosen


def _gated(hidden: int, width: int, count: int, *, expert: bool = False, prefix: str = "") -> list[Linear]:
    return [
        Linear(name=f"{prefix}gate_proj", inputs=hidden, outputs=width, count=count, expert=expert),
        Linear(name=f"{prefix}up_proj", inputs=hidden, outputs=width, count=count, expert=expert),
        Linear(name=f"{prefix}down_proj", inputs=width, outputs=hidden, count=count, expert=expert),
    ]


def _cached_config(path: str) -> Path | None:
    """`config.json` of a hub id in this machine's cache: that of the main branch, else of any snapshot."""
    if path.count("/") != 1 or not all(path.split("/")) or path.startswith((".", "~")):
        return None
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser() / f"models--{path.replace('/', '--')}"
    snapshots = sorted((root / "snapshots").glob("*/config.json"))
    main = root / "refs" / "main"
    if main.is_file():
        current = root / "snapshots" / main.read_text(encoding="utf-8").strip() / "config.json"
        snapshots.insert(0, current)
    return next((found for found in snapshots if found.is_file()), None)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read ({error}); give a folder with a model's config.json") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object; give a folder with a model's config.json")
    return config
