"""Groups of ranks, formed in time. Ranks meet at a store, and torch waits for one whose process stands still without an end."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from polyturn.processes.deadlines import run_with_deadline

T = TypeVar("T")
_cuda: Any = torch.cuda  # part of it is in no stub

_GRACE_S = 5.0
"""Torch keeps some deadlines itself, and then says more than that time is up."""


def form(make: Callable[[], T], deadline_s: float) -> T:
    """`make()`, which talks to the store of the ranks. Raises DeadlineError, and what torch raises."""
    device = _cuda.current_device() if _cuda.is_initialized() else 0  # a look must not begin to use a GPU

    def make_on_device() -> T:
        if device:  # each thread has its own, and begins with 0
            _cuda.set_device(device)
        return make()

    return run_with_deadline(make_on_device, deadline_s + _GRACE_S, "the store at which the ranks meet")


def own(lines: Sequence[Sequence[int]], rank: int, deadline_s: float) -> Any:
    """A group of each line of ranks, which are all of them; returns that of `rank`. A collective."""
    limit = datetime.timedelta(seconds=deadline_s)
    formed = [dist.new_group(list(line), timeout=limit) for line in lines]
    return next(group for group, line in zip(formed, lines, strict=True) if rank in line)
