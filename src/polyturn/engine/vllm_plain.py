"""Linear layers of vLLM that compute with the weights as they are, for CPUs: the name, and how vLLM hears of it.

There vLLM packs the weights of every layer when it has loaded them, and computes with the packed copy: whoever changes a weight
afterwards changes nothing, or, with a tied head, only half of it. Layers by this "quantization", which vLLM lets others
register, pack nothing. On a GPU vLLM's own layers do not either. The layers are in `vllm_plain_layers`, which needs vLLM.
"""

from __future__ import annotations

from polyturn.weight_sync.labels import PLAIN as NAME

__all__ = ["NAME", "register"]


def register() -> None:
    """Tell vLLM of it. Safe to call again. A process that vLLM spawns hears of it with its settings."""
    import polyturn.engine.vllm_plain_layers  # noqa: F401  importing it is what registers
