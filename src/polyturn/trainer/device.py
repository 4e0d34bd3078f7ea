"""Numpy arrays on the device that computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_device(values: Any, device: torch.device) -> torch.Tensor:
    """A numpy array as a tensor on `device`, for which nothing waits: a GPU fetches it from pinned memory in its own time."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
