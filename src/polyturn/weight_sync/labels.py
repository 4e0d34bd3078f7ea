"""What engine servers and whoever asks them call things. Needs no torch."""

from __future__ import annotations

DEFAULT_LABEL = "default"
"""What a server that got no weights yet calls those it has."""
BROKEN_LABEL = "broken"
"""What a vLLM worker of ours calls the mixture that an update left which did not come through whole."""
WEIGHT_LABEL = "POLYTURN_WEIGHT_LABEL"
"""Variable that tells such a worker what the weights are called that it loads at its start."""
EXTENSION = "polyturn.engine.vllm_worker.Extension"
"""The worker extension that a vLLM server needs for checksums and for `nccl`."""
BACKEND = "polyturn"
"""The weight-transfer backend that importing the extension registers."""
WEIGHTS_ROUTE = "/polyturn/weights"
"""Ours: names, types and shapes of a server's weights, and their checksums when asked for. vLLM's routes have no such."""
RPC = "/collective_rpc"
"""vLLM's: calls a method of every worker."""
