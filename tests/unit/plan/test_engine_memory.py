"""The known start of a paged engine comes out, and the hf engine's terms by hand."""

from __future__ import annotations

from typing import Any

import pytest

from polyturn.errors import ConfigError
from polyturn.plan.engine_memory import BLOCK_TOKENS, DOUBT, HfLoad, PagedEngine, PagedLoad, budget_of, hf_terms, paged_engine
from polyturn.plan.hardware import load_hardware
from polyturn.plan.memory import TrainerLoad, peak
from polyturn.plan.models import model_facts

GIB = 1 << 30
A100 = load_hardware().gpu("a100-40gb").usable_bytes


def started(path: str, *, share: float, usable_bytes: float = A100, **load: Any) -> PagedEngine:
    """A paged engine with a share of a GPU."""
    return paged_engine(model_facts(path), PagedLoad(**load), budget=budget_of(share, usable_bytes))


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_the_known_start():
    """What vLLM reports for Qwen2.5-7B on one A100 of 40 GB at 85 %, to the last digit that it prints."""
    plan = started("Qwen/Qwen2.5-7B", share=0.85, context=131_072)
    reported = {term.name: round(term.bytes / GIB, 2) for term in plan.terms}
    assert reported == {"engine weights": 14.27, "engine activations": 17.39, "engine non-torch": 0.09}
    assert round(plan.budget / GIB, 2) == 33.57
    assert round(plan.kv_bytes / GIB, 2) == 1.82
    assert (plan.blocks, plan.tokens) == (2131, 34_096)
    refusal = plan.refusal(131_072)
    assert refusal is not None
    assert refusal.endswith("1.82 are left, which is 34,096 tokens; starts differ by 0.14, so ask for at most 31,472")


def test_a_context_of_8192_fits_there():
    plan = started("Qwen/Qwen2.5-7B", share=0.85, context=8192)
    assert plan.refusal(8192) is None
    assert plan.sequences(8192) > 30
    assert plan.sequences(plan.tokens) == 1
    assert plan.sequences(plan.tokens + 1) == 0


def test_without_the_activation_peak_it_would_seem_to_fit():
    plan = started("Qwen/Qwen2.5-7B", share=0.85, context=131_072)
    others = sum(term.bytes for term in plan.terms if term.name != "engine activations")
    assert (plan.budget - others) / plan.bytes_per_token > 131_072


def test_the_label_would_say_more_blocks():
    plan = started("Qwen/Qwen2.5-7B", usable_bytes=40 * GIB, share=0.85, context=131_072)
    assert plan.blocks > 2131


def test_chunked_prompts_need_a_smaller_trial_batch():
    plan = started("Qwen/Qwen2.5-7B", share=0.85, context=131_072, batched_tokens=8192)
    assert plan.refusal(131_072) is None


def test_no_room_at_all():
    plan = started("Qwen/Qwen2.5-72B", share=0.9, context=4096)
    assert (plan.blocks, plan.tokens, plan.sequences(1)) == (0, 0, 0)
    assert "leave no room for a KV cache" in (plan.refusal(1) or "")


def test_latent_attention_caches_latents():
    plan = started("deepseek-ai/DeepSeek-V2-Lite", usable_bytes=2 * A100, share=0.9, context=4096)
    assert plan.bytes_per_token == 27 * 576 * 2


@pytest.mark.parametrize(("share", "context"), [(0, 1), (1.1, 1), (-1, 1), (float("nan"), 1), (0.5, 0)])
def test_absurd_numbers(share, context):
    with pytest.raises(ConfigError, match="above 0"):
        started("Qwen/Qwen2.5-7B", share=share, context=context)


def test_the_hf_engine_by_hand():
    facts = model_facts("Qwen/Qwen2.5-0.5B")
    terms = {term.name: term.bytes for term in hf_terms(facts, HfLoad(dtype="bfloat16", sequences=4, context=1000))}
    assert terms["engine weights"] == 2 * 494_032_768
    assert terms["KV cache"] == pytest.approx(4 * 1000 * (24 + 1) * 2 * 128 * 2)
    assert terms["attention mask"] == 4 * 1000 * 1000
    assert terms["prefill"] == 4 * 1000 * 2 * (4 * 896 + 3 * 4864)


def test_with_adapters_the_base_is_there_once():
    facts = model_facts("Qwen/Qwen2.5-0.5B")
    load = HfLoad(dtype="bfloat16", sequences=4, context=1000)
    trainer = TrainerLoad(
        dtype="bfloat16",
        row_tokens=8,
        trained_tokens=8,
        rows=2,
        lora_rank=8,
        lora_targets=("q_proj",),
        master_weights="float32",
    )
    alone, shared = hf_terms(facts, load), hf_terms(facts, load, shares_base=trainer)
    assert shared[0].bytes == 2 * 24 * 8 * (896 + 896)
    assert peak(alone) - peak(shared) == alone[0].bytes - shared[0].bytes


def test_room_for_a_context_is_there_when_a_start_takes_more():
    """The longest context leaves what starts differ by; the block after it would not."""
    plan = started("Qwen/Qwen2.5-7B", share=0.85, context=131_072)
    assert plan.longest == 31_472
    assert plan.refusal(plan.longest) is None
    assert plan.refusal(plan.longest + 1) is not None
    left = plan.kv_bytes - plan.longest * plan.bytes_per_token
    assert DOUBT <= left < DOUBT + BLOCK_TOKENS * plan.bytes_per_token
