"""`builtin:tiny`: a 0.3 M parameter Llama, built from a seed, for one environment's words."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polyturn.models.folder import TINY_POSITIONS


def build_tiny(*, vocab_size: int, eos_id: int, pad_id: int, seed: int) -> LlamaForCausalLM:
    """A small random decoder: width 128, 2 layers, 4 heads, tied embeddings, float32. The same seed gives the same weights."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TINY_POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=eos_id,
        bos_token_id=None,
        pad_token_id=pad_id,
        initializer_range=0.02,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
