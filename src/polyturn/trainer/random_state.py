"""The generators that a process draws from without naming one: Python's, numpy's, torch's, and those of its GPUs.

Nothing of Polyturn's own draws from them once a run has started; environments, rewards and estimators that people bring may.
"""

from __future__ import annotations

import base64
import random
from typing import Any, TypeAlias

import numpy as np
import torch

RandomState: TypeAlias = "dict[str, Any]"
"""Plain JSON."""


def random_state() -> RandomState:
    """Where all of them stand."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, _packed(np.asarray(keys, dtype="<u4").tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _packed(bytes(torch.get_rng_state().numpy())),
        "cuda": [_packed(bytes(state.numpy())) for state in devices],
    }


def restore_random_state(state: RandomState) -> None:
    """Put them where they stood; GPUs as far as there are as many."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype="<u4"), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if torch.cuda.is_available():
        for index, packed in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_bytes(packed), index)


def _packed(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _bytes(packed: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(packed)), dtype=torch.uint8)
