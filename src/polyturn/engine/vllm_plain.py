"""Linear layers of vLLM that compute with the weights as they are, for CPUs.

There vLLM packs the weights of every layer when it has loaded them, and computes with the packed copy: whoever changes a weight
afterwards changes nothing, or, with a tied head, only half of it. Layers by this "quantization", which vLLM lets others
register, pack nothing. On a GPU vLLM's own layers do not either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "polyturn_plain"


def register() -> None:
    """Tell vLLM of it. Safe to call again."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    if NAME in QUANTIZATION_METHODS:
        return

    class PlainLinear(UnquantizedLinearMethod):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: Any) -> None:
            """The weights stay as they are."""

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return torch.nn.functional.linear(x, layer.weight, bias)

    class PlainEmbedding(UnquantizedEmbeddingMethod):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: Any) -> None:
            """The weights stay as they are."""

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return torch.nn.functional.linear(x, layer.weight, bias)

    @register_quantization_config(NAME)
    class PlainConfig(QuantizationConfig):  # type: ignore[misc]
        def get_name(self) -> str:
            return NAME

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16, torch.float16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> PlainConfig:
            return cls()

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if isinstance(layer, LinearBase):
                return PlainLinear()
            return PlainEmbedding() if isinstance(layer, VocabParallelEmbedding) else None
