"""Tiny models with random weights, and model folders around them: what the training tests train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from polyturn.models.load import export_model
from polyturn.rendering.renderer import Renderer
from polyturn.rendering.words import save_word_tokenizer

VOCAB = 48

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    # A window shorter than the samples, so that a wrong mask would show.
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    # The soft cap of its scores keeps transformers from using SDPA.
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}),
}
"""Config class and what it needs beyond the common sizes."""


def tiny_model(architecture: str = "llama", *, seed: int = 0, attention: str = "sdpa", **given: Any) -> torch.nn.Module:
    """A random decoder of about 20,000 parameters. Its weights are large, so that its predictions are far from uniform."""
    name, extra = ARCHITECTURES[architecture]
    config = getattr(transformers, name)(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            "tie_word_embeddings": False,
        }
        | extra
        | given
    )
    attention = "eager" if architecture == "gemma2" else attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval()


def save_model_folder(folder: Path, words: tuple[str, ...], pattern: str, *, seed: int = 0, **given: Any) -> Path:
    """A folder with a word tokenizer, its chat template and a random model of that vocabulary; no warm start."""
    save_word_tokenizer(folder, words, pattern)
    renderer = Renderer.load(folder)
    end = renderer.stop_ids[0]
    sizes = {"vocab_size": renderer.tokenizer.vocab_size, "pad_token_id": end, "eos_token_id": end}
    model = tiny_model(seed=seed, **(sizes | {"initializer_range": 0.1, "tie_word_embeddings": True} | given))
    export_model(model, folder, folder)
    return folder


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every weight."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every gradient."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are equal to the bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def largest_gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of tensors, relative to the largest entry of each tensor."""
    assert left.keys() == right.keys()
    return max(float((left[k] - right[k]).abs().max() / (right[k].abs().max() + 1e-12)) for k in right)


@torch.no_grad()
def plain_logprobs(model: Any, ids: Any, temperature: float) -> torch.Tensor:
    """Log-probabilities of `ids[1:]` by an ordinary forward of one unpacked sequence, `[T - 1]`."""
    ids_T = torch.as_tensor(ids)
    logits_TV = model(input_ids=ids_T[None]).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits_TV, dim=-1).gather(-1, ids_T[1:, None])[:, 0]
