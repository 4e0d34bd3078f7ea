"""The layers of `vllm_plain`. Importing this module registers them with vLLM.

They are classes of a module, since vLLM sends its settings, this one among them, to the processes that it spawns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from polyturn.engine.vllm_plain import NAME


class PlainLinear(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer whose weight stays as it is."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """The weights stay as they are."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product with the weight of now."""
        return torch.nn.functional.linear(x, layer.weight, bias)


class PlainEmbedding(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """An embedding, or a head, whose weight stays as it is."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """The weights stay as they are."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product with the weight of now."""
        return torch.nn.functional.linear(x, layer.weight, bias)


@register_quantization_config(NAME)
class PlainConfig(QuantizationConfig):  # type: ignore[misc]
    """Gives every layer such methods."""

    def get_name(self) -> str:
        """See vLLM."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """See vLLM."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """See vLLM."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """See vLLM."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlainConfig:
        """See vLLM."""
        return cls()

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """See vLLM."""
        if isinstance(layer, LinearBase):
            return PlainLinear()
        return PlainEmbedding() if isinstance(layer, VocabParallelEmbedding) else None
