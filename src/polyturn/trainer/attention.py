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

VARLEN = "polyturn_varlen"
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
    if model.config._attn_implementation == VARLEN:
        model.set_attn_implementation("sdpa")


def _register() -> None:
    """Tell transformers of it. Safe to call again.

    No kind of mask is registered beside it: transformers then makes none, and does not look for samples in the positions, which
    would wait for the GPU in every row.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, varlen_attention)


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
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one packed row, as transformers calls it; N query heads, M key heads, D their size.

    Without `cu_seq_lens_q` the row is one sample. Returns `[1, T, N, D]`.
    """
    from torch.nn.attention.varlen import varlen_attn

    assert dropout == 0.0, "the policy that is trained is the one that sampled: there is no dropout"
    query_TND, key_TMD, value_TMD = (states[0].transpose(0, 1) for states in (query_1NTD, key_1MTD, value_1MTD))
    length = query_TND.shape[0]
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q, max_length_q = torch.tensor([0, length], dtype=torch.int32, device=query_TND.device), length
    # The kernel groups query heads over fewer key heads itself; torch 2.11 lets it, later ones want to be told.
    options: dict[str, Any] = {"enable_gqa": True} if _ASKS_FOR_GROUPS else {}
    left = -1 if sliding_window is None else sliding_window - 1
    out_TND = varlen_attn(
        query_TND,
        key_TMD,
        value_TMD,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(left, 0),
        **options,
    )
    assert isinstance(out_TND, Tensor), "nothing besides the output was asked for"
    return out_TND[None], None


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
