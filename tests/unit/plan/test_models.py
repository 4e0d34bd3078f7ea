"""Parameters counted from published sizes against the counts of the published weights, and parts by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.errors import ModelError
from polyturn.plan.known_models import CONFIGS
from polyturn.plan.models import facts_from_config, model_facts

COUNTED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "builtin:smollm2": 134_515_008,
}


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize(("path", "count"), COUNTED.items())
def test_parameters(path, count):
    facts = model_facts(path)
    assert facts.parameters == count
    tensors = sum(length * number for length, number in facts.other_tensors())
    matrices = sum(linear.inputs * linear.outputs * linear.count for linear in facts.linears)
    assert tensors + matrices == count, "the tensors are all of the parameters"


def test_parts_by_hand():
    facts = model_facts("Qwen/Qwen2.5-0.5B")
    assert facts.embedding == 151936 * 896
    assert facts.head == 0, "tied"
    attention = 896 * 896 * 2 + 2 * 896 * 128 + 896 + 2 * 128
    assert facts.layer_weights == 24 * (attention + 3 * 896 * 4864)
    assert facts.norm_weights == 49 * 896


def test_kv_bytes_of_a_token():
    assert model_facts("Qwen/Qwen2.5-7B").kv_bytes_per_token(2) == 28 * 2 * 4 * 128 * 2 == 57_344
    assert model_facts("Qwen/Qwen3-1.7B").kv_bytes_per_token(2) == 28 * 2 * 8 * 128 * 2, "head_dim is not hidden / heads"


def test_latent_attention_keeps_less():
    facts = model_facts("deepseek-ai/DeepSeek-V2-Lite")
    assert facts.kv_bytes_per_token(2, latent=True) == 27 * (512 + 64) * 2
    assert facts.kv_bytes_per_token(2) == 27 * 16 * (128 + 64 + 128) * 2


def test_a_token_passes_some_experts():
    facts = model_facts("mistralai/Mixtral-8x7B-v0.1")
    assert (facts.experts_per_token, facts.intermediate) == (2, 2 * 14336)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "Qwen2.5-7B", "qwen/qwen2.5-7b"])
def test_short_names(name):
    assert model_facts(name).name == "Qwen/Qwen2.5-7B"


def test_a_folder_goes_before_the_table(tmp_path):
    config = {**CONFIGS["Qwen/Qwen2.5-0.5B"], "num_hidden_layers": 2}
    del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert model_facts(str(tmp_path)).layers == 2


def test_the_hub_cache_goes_before_the_table(tmp_path):
    root = tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B"
    for commit, layers in (("aaa", 3), ("bbb", 4)):
        (root / "snapshots" / commit).mkdir(parents=True)
        text = json.dumps({**CONFIGS["Qwen/Qwen2.5-0.5B"], "num_hidden_layers": layers})
        (root / "snapshots" / commit / "config.json").write_text(text, encoding="utf-8")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("bbb\n", encoding="utf-8")
    assert model_facts("Qwen/Qwen2.5-0.5B").layers == 4


def test_an_unknown_model_gets_the_nearest():
    with pytest.raises(ModelError, match=r"did you mean Qwen/Qwen2\.5-7B\?"):
        model_facts("Qwen/Qwen2.5-7Bx")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "qwen"}, "model_type=qwen is not among .* did you mean qwen[23]"),
        ({"hidden_size": -1}, "hidden_size=-1; a whole number above 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"intermediate_size": 10**30}, "intermediate_size=1000"),
        ({"model_type": "qwen3_moe"}, "num_experts_per_tok=None"),
    ],
)
def test_a_config_that_is_none(change, sentence):
    with pytest.raises(ModelError, match=sentence):
        facts_from_config({**CONFIGS["Qwen/Qwen2.5-0.5B"], **change}, name="mine")


@pytest.mark.parametrize("text", ["", "[]", None])
def test_a_folder_without_a_config(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json (can't be read|holds no JSON object)"):
        model_facts(str(tmp_path))


@given(
    name=st.sampled_from(sorted(CONFIGS)),
    key=st.sampled_from(sorted({key for config in CONFIGS.values() for key in config} | {"mlp_only_layers"})),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers() | st.text()),
)
def test_any_value_is_counted_or_refused(name, key, value):
    try:
        facts = facts_from_config({**CONFIGS[name], key: value}, name="mine")
    except ModelError:
        return
    assert facts.parameters > 0
    assert facts.kv_bytes_per_token(2) > 0
