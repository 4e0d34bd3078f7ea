"""Which models have layers that can be cut by heads; what ranks of cut layers compute is in test_shards.py."""

from __future__ import annotations

import pytest

from parts.models import tiny_model
from polyturn.errors import ModelError
from polyturn.trainer import attention
from polyturn.trainer.attention import VARLEN
from polyturn.trainer.tensor_parallel import CutLayersProbe, LayerPlan


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "granite", "cohere"])
def test_architectures_that_are_cut_by_heads(architecture):
    model = tiny_model(architecture)
    assert LayerPlan(model, 2).summed == set(), "known once layers are cut"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (tiny_model("phi3"), r"type phi3: their .*self_attn\.qkv_proj \(colwise_gather_output\) can't be cut by heads"),
        (tiny_model("qwen3_moe"), r"type qwen3_moe: their layers\.\*\.mlp\.experts \(moe_tp_experts\)"),
        (tiny_model(num_key_value_heads=1), "tensor_ranks=2 does not divide num_key_value_heads=1"),
        (tiny_model(intermediate_size=47), "tensor_ranks=2 does not divide intermediate_size=47"),
    ],
    ids=["fused", "experts", "heads", "width"],
)
def test_others_are_refused_by_name(model, words):
    with pytest.raises(ModelError, match=words):
        LayerPlan(model, 2)


def test_what_a_plan_says_of_the_embedding_is_none_of_ours():
    """Transformers 5.19 adds it to the plan of a model whose embedding is tied."""
    model = tiny_model()
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    assert LayerPlan(model, 2).summed == set()


def test_a_model_without_a_plan_is_refused():
    model = tiny_model()
    model.config.base_model_tp_plan = None
    with pytest.raises(ModelError, match="transformers has no plan of their layers"):
        LayerPlan(model, 2)


def test_whole_weights_on_a_cpu_are_tried_without_a_gpu_s_kernels():
    attention._register()
    model = tiny_model()
    model.set_attn_implementation(VARLEN)
    probe = CutLayersProbe(model)
    assert model.config._attn_implementation == VARLEN
    model.set_attn_implementation("sdpa")
    assert probe.gap() == 0.0
    with pytest.raises(ModelError, match=r"type llama compute something else when their layers are cut.* differ by 0\.5"):
        probe.refuse([0.0, 0.5])
    with pytest.raises(ModelError, match="differ by nan"):
        probe.refuse([0.0, float("nan")])
