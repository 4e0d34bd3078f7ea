"""Attention over packed rows on a GPU: each sample attends to itself alone, and no work is spent on a mask.

PyTorch's own variable-length attention, registered with transformers under a name of ours, so that every architecture whose
attention goes through transformers' interface can use it. It needs no further package. Where the recipe's weights are float32,
or the model squashes its attention scores, transformers' SDPA with a block mask does the same, slower.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from polyturn.errors import ConfigError

_OURS = "polyturn_"
VARLEN = f"{_OURS}varlen"
_HALF = (torch.bfloat16, torch.float16)


def use_attention(model: Any, asked: str, *, on_gpu: bool | None = None) -> None:
    """Make `model`, which was loaded with transformers' own choice, attend as `model.attention=asked` says.

    `on_gpu` says where it will compute; None: where it is.

    `auto` takes ours where it is exact and runs. Raises ConfigError where what is asked for can't be had.
    """
    weight = next(model.parameters())
    on_gpu = weight.is_cuda if on_gpu is None else on_gpu
    fits = on_gpu and weight.dtype in _HALF and not _squashes(model.config) and _available()
    if asked == "varlen" and not fits:
        raise ConfigError(
            "model.attention=varlen needs a GPU, weights of 16 bits, torch 2.11 or newer, and a model that does not squash its "
            "attention scores; use auto"
        )
    if asked == "varlen" or (asked == "auto" and fits):
        _register()
        model.set_attn_implementation(VARLEN)


def use_plain_attention(model: Any) -> None:
    """Undo `use_attention`, for a model that generates: ours knows no cache."""
    if model.config._attn_implementation.startswith(_OURS):
        model.set_attn_implementation("sdpa")


def _register() -> None:
    """Tell transformers of it. Safe to call again.

    No kind of mask is registered beside it: transformers then makes none, and does not look for samples in the positions, which
    would wait for the GPU in every row.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, varlen_attention)


def as_length(length: int, like: Tensor) -> Tensor:
    """`length` as the size of an empty tensor, for compiled layers.

    A number would be compiled in until it changes, and then the layers are compiled once more: in the middle of a run, when the
    longest sample of the batch is no longer cut at the limit.
    """
    carrier = like.new_empty((length, 0))
    torch._dynamo.maybe_mark_dynamic(carrier, 0)
    return carrier


def varlen_attention(
    module: torch.nn.Module,
    query_1NTD: Tensor,
    key_1MTD: Tensor,
    value_1MTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    longest: Tensor | None = None,
    seen: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    longest_key: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one packed row, as transformers calls it; N query heads, M key heads, D their size.

    Lengths are from `as_length`. Without `cu_seq_lens_q` the row is one sample. With `seen` it has segments that follow others:
    keys are those at these places (see `trainer.tree`), with beginnings and a length of their own. Returns `[1, T, N, D]`.
    """
    assert dropout == 0.0, "the policy that is trained is the one that sampled: there is no dropout"
    query_TND, key_TMD, value_TMD = (states[0].transpose(0, 1) for states in (query_1NTD, key_1MTD, value_1MTD))
    length = query_TND.shape[0]
    if cu_seq_lens_q is None or longest is None:
        cu_seq_lens_q, most = torch.tensor([0, length], dtype=torch.int32, device=query_TND.device), length
    else:
        most = longest.shape[0]
    starts, lengths = (cu_seq_lens_q, cu_seq_lens_q), (most, most)
    if seen is not None:
        assert cu_seq_lens_k is not None, "keys of their own have beginnings of their own"
        assert longest_key is not None
        key_TMD, value_TMD = at_places(key_TMD, seen), at_places(value_TMD, seen)
        starts, lengths = (cu_seq_lens_q, cu_seq_lens_k), (most, longest_key.shape[0])
    out_TND = causal_varlen(query_TND, key_TMD, value_TMD, starts, lengths, scaling=scaling, window=sliding_window)
    return out_TND[None], None


def causal_varlen(
    query_TND: Tensor,
    key_UMD: Tensor,
    value_UMD: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Queries of samples laid end to end to the keys of the same samples, `[T, N, D]`; `starts` and `longest` of both.

    Where a sample has fewer queries than keys, they are its last: the kernel aligns the ends. Keys that none sees are allowed.
    """
    from torch.nn.attention.varlen import varlen_attn

    # The kernel groups query heads over fewer key heads itself; torch 2.11 lets it, later ones want to be told.
    options: dict[str, Any] = {"enable_gqa": True} if _ASKS_FOR_GROUPS else {}
    left = -1 if window is None else window - 1
    out_TND = varlen_attn(query_TND, key_UMD, value_UMD, *starts, *longest, scale=scaling, window_size=(left, 0), **options)
    assert isinstance(out_TND, Tensor), "nothing besides the output was asked for"
    return out_TND


def at_places(states_TMD: Tensor, index_U: Tensor) -> Tensor:
    """Keys or values laid out anew, `[U, M, D]`. What many saw gets the sum of their gradients, summed in float32 at least."""
    exact = torch.promote_types(states_TMD.dtype, torch.float32)
    return states_TMD.to(exact).index_select(0, index_U).to(states_TMD.dtype)


def _available() -> bool:
    try:
        import torch.nn.attention.varlen
    except ImportError:
        return False
    return "window_size" in inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters


def _asks_for_groups() -> bool:
    """Whether this torch refuses fewer key heads than query heads unless told that they are groups (from 2.12 on)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


_ASKS_FOR_GROUPS = _asks_for_groups()


def _squashes(config: Any) -> bool:
    """Whether the model bounds its attention scores, which the kernel can't."""
    return getattr(config, "attn_logit_softcapping", None) is not None
