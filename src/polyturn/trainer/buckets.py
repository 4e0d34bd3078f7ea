"""Tensors that are worked on together: many small ones cost as little as few large ones, and few at a time take little room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor

SomeTensor = TypeVar("SomeTensor", bound=Tensor)


def in_buckets(tensors: Iterable[SomeTensor], most_bytes: int) -> Iterator[list[SomeTensor]]:
    """Tensors of one type and device, in order, up to `most_bytes` together; one that is larger is alone."""
    bucket: list[SomeTensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (held + size > most_bytes or (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += size
    if bucket:
        yield bucket
