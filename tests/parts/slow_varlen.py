"""PyTorch's variable-length attention, slow and anywhere: what its documentation says the kernel computes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def slow_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """`[T, heads, size]`; queries of a sample are aligned with the end of its keys."""
    assert window_size[1] == 0, "causal"
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (max_q, max_k)
    assert (int(cu_q[-1]), int(cu_k[-1])) == (len(query), len(key))
    assert {query.dtype, key.dtype, value.dtype} == {query.dtype}
    if query.shape[1] != key.shape[1]:
        key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    out = []
    for (first_q, end_q), (first_k, end_k) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        q, k, v = (states.transpose(0, 1) for states in (query[first_q:end_q], key[first_k:end_k], value[first_k:end_k]))
        back = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        hidden = (back < 0) | ((back > window_size[0]) if window_size[0] >= 0 else False)
        scores = (q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(hidden, float("-inf"))
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


def telling_varlen(*tensors: Any, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
    """That of a torch which has to be told of groups."""
    assert enable_gqa or tensors[0].shape[1] == tensors[1].shape[1]
    return slow_varlen(*tensors, **options)
