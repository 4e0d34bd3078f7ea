"""Whole tensors from sharded ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def gather_shards(state: Any) -> None:
    """Take part in gathering every sharded tensor of `state`, one after the other, for another rank that wants them whole."""
    if isinstance(state, Tensor):
        gather: Any = getattr(state, "full_tensor", None)
        if gather is not None:
            gather()
    elif isinstance(state, Mapping):
        for value in state.values():
            gather_shards(value)
    elif isinstance(state, list | tuple):
        for value in state:
            gather_shards(value)
