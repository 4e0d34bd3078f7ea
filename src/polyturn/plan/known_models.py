"""Published sizes of common models, as their `config.json` has them, for when no folder is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _dense(
    family: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, positions: int,
    *, tied: bool = False, head_dim: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "head_dim": head_dim,
    }


_QWEN25 = {
    "0.5B": (_dense("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, tied=True), 32768),
    "1.5B": (_dense("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, tied=True), 32768),
    "3B": (_dense("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, tied=True), 32768),
    "7B": (_dense("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072), 32768),
    "14B": (_dense("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072), 32768),
    "32B": (_dense("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072), 32768),
    "72B": (_dense("qwen2", 8192, 29568, 80, 64, 8, 152064, 131072), 32768),
}
"""With the longest context of the `-Instruct` models, which are of the same shape."""
_LLAMA8B = _dense("llama", 4096, 14336, 32, 32, 8, 128256, 131072)
_MISTRAL7B = _dense("mistral", 4096, 14336, 32, 32, 8, 32000, 32768)
_SMOLLM2 = _dense("llama", 576, 1536, 30, 9, 3, 49152, 8192, tied=True)
_TINY = _dense("llama", 128, 256, 2, 4, 4, 512, 2048, tied=True)

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **{f"Qwen/Qwen2.5-{size}": config for size, (config, _) in _QWEN25.items()},
    **{
        f"Qwen/Qwen2.5-{size}-Instruct": {**config, "max_position_embeddings": positions}
        for size, (config, positions) in _QWEN25.items()
    },
    "Qwen/Qwen3-0.6B": _dense("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, tied=True, head_dim=128),
    "Qwen/Qwen3-1.7B": _dense("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, tied=True, head_dim=128),
    "Qwen/Qwen3-4B": _dense("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, tied=True, head_dim=128),
    "Qwen/Qwen3-8B": _dense("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
    "Qwen/Qwen3-30B-A3B": {
        **_dense("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, head_dim=128),
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    },
    "meta-llama/Llama-3.1-8B": _LLAMA8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA8B,
    "mistralai/Mistral-7B-v0.1": _MISTRAL7B,
    "mistralai/Mistral-7B-v0.3": {**_MISTRAL7B, "vocab_size": 32768},
    "mistralai/Mixtral-8x7B-v0.1": {
        **_dense("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768), "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "deepseek-ai/DeepSeek-V2-Lite": {
        **_dense("deepseek_v2", 2048, 10944, 27, 16, 16, 102400, 163840),
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    "HuggingFaceTB/SmolLM2-135M": _SMOLLM2,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2,
    "builtin:smollm2": _SMOLLM2,
    "builtin:tiny": _TINY,
}  # fmt: skip
"""By hub id. `builtin:tiny` has the words of its environment, which are fewer than the 512 here."""
ALIASES: Mapping[str, str] = {
    "mixtral-8x7b": "mistralai/mixtral-8x7b-v0.1",
    "mistral-7b": "mistralai/mistral-7b-v0.1",
}
"""Names without a version."""
