"""Adapters beside the layers of a model: which, how they start, what is frozen, exported, loaded and merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parts.models import same_bits, tiny_model
from polyturn.errors import ModelError
from polyturn.models.adapters import (
    adapter_parameters,
    adapters_off,
    add_adapters,
    copy_for_sampling,
    frozen_weights,
    has_adapters,
    load_adapters,
    pushed_weights,
    save_adapters,
)
from polyturn.models.load import export_model, load_model, merge_folder

pytestmark = pytest.mark.real  # the quick tests do without peft

IDS = torch.arange(10)[None]
CPU = torch.device("cpu")


def adapted(architecture: str = "llama", *, seed: int = 0, targets=None, learned: bool = True, dtype=torch.float32):
    model = tiny_model(architecture).to(dtype)
    add_adapters(model, rank=2, alpha=6.0, targets=targets, base="owner/name", seed=seed)
    if learned:
        generator = torch.Generator().manual_seed(1)
        for parameter in adapter_parameters(model):
            parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.3).to(dtype)
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "phi3", "qwen3_moe"])
def test_fresh_adapters_change_nothing_and_are_all_that_is_trained(architecture):
    plain, model = tiny_model(architecture), adapted(architecture, learned=False)
    assert torch.equal(logits(model), logits(plain))
    assert type(model) is type(plain)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(pushed_weights(model)) == {name for name in model.state_dict() if ".lora_" in name}
    assert set(frozen_weights(model)) == set(model.state_dict()) - trained
    assert has_adapters(model)
    assert not has_adapters(plain)
    assert frozen_weights(plain) == {}


def test_all_linear_layers_of_the_decoder_by_default():
    model = adapted()
    beside = {name.partition(".lora_")[0].split("layers.")[1][2:] for name in pushed_weights(model)}
    assert beside == {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    assert len(pushed_weights(model)) == 2 * 7 * 2


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("self_attn.q_proj", "v_proj")])
def test_targets_by_name(targets):
    beside = {name.partition(".lora_")[0].rpartition(".")[2] for name in pushed_weights(adapted(targets=targets))}
    assert beside == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("target", "hint"), [("q_prj", "did you mean q_proj"), ("lm_head", "valid: down_proj"), ("proj", "did you mean v_proj")]
)
def test_a_target_that_is_no_layer_of_the_decoder(target, hint):
    with pytest.raises(ModelError, match=f"model.lora.targets: {target} is no linear layer .*{hint}"):
        adapted(targets=(target,))


def test_the_seed_decides():
    assert same_bits(pushed_weights(adapted(learned=False)), pushed_weights(adapted(learned=False)))
    other = pushed_weights(adapted(learned=False, seed=1))
    assert not same_bits(pushed_weights(adapted(learned=False)), other)


def test_the_seed_disturbs_nobody():
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    adapted(learned=False)
    assert torch.equal(torch.rand(3), wanted)


def test_adapters_have_the_type_of_the_weights():
    assert {p.dtype for p in adapted(dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_the_formula():
    """What an adapter adds is alpha / rank x B x A x input."""
    plain, model = tiny_model(), adapted(targets=("down_proj",))
    layer, own = model.model.layers[0].mlp.down_proj, plain.model.layers[0].mlp.down_proj
    x = torch.randn(3, 48)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), own(x) + 3.0 * x @ a.T @ b.T)


def test_off_is_the_base_and_on_again_whatever_happens():
    plain, model = tiny_model(), adapted()
    whole = logits(model)
    with adapters_off(model):
        assert torch.equal(logits(model), logits(plain))
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert torch.equal(logits(model), whole)
    assert not torch.equal(whole, logits(plain))
    assert all(parameter.requires_grad for parameter in adapter_parameters(model))


def test_a_copy_for_sampling_shares_what_is_frozen():
    model = adapted()
    copied = copy_for_sampling(model)
    for (name, one), (_, other) in zip(model.named_parameters(), copied.named_parameters(), strict=True):
        assert (one is other) == (".lora_" not in name), name
    before = logits(copied)
    with torch.no_grad():
        for parameter in adapter_parameters(model):
            parameter.add_(1.0)
    assert torch.equal(logits(copied), before)
    with adapters_off(model):
        assert torch.equal(logits(copied), before), "its own adapters stay on"


def test_a_copy_of_a_whole_model_shares_nothing():
    model = tiny_model()
    pairs = zip(model.parameters(), copy_for_sampling(model).parameters(), strict=True)
    assert all(one is not other and one.data_ptr() != other.data_ptr() for one, other in pairs)


# ── folders ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_peft_loads_what_is_exported(architecture, tmp_path):
    import peft

    model = adapted(architecture)
    export_model(model, tmp_path, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(tiny_model(architecture), str(tmp_path))
    assert torch.equal(logits(loaded.eval()), logits(model))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/name"
    assert (config["r"], config["lora_alpha"]) == (2, 6)
    assert max(len(name) for name in config["target_modules"]) < 12, "layers are named as others name them"


def test_so_do_we(tmp_path):
    model = adapted()
    save_adapters(model, tmp_path)
    loaded = tiny_model()
    load_adapters(loaded, tmp_path, base="owner/name")
    assert torch.equal(logits(loaded), logits(model))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_adapters_of_another_model_are_refused(tmp_path):
    save_adapters(adapted(), tmp_path)
    with pytest.raises(ModelError, match="don't fit their base model other/model"):
        load_adapters(tiny_model(hidden_size=16), tmp_path, base="other/model")
    with pytest.raises(ModelError, match="don't fit"):
        load_adapters(tiny_model(num_hidden_layers=1), tmp_path, base="other/model")


def test_a_file_that_lacks_some_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_adapters(adapted(), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="1 tensors have no counterpart"):
        load_adapters(tiny_model(), tmp_path, base="other/model")


def test_a_merged_folder_is_an_ordinary_one(tmp_path):
    base, adapters, merged = (tmp_path / name for name in ("base", "adapters", "merged"))
    for folder in (base, adapters):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
    tiny_model().save_pretrained(base)
    model = adapted()
    save_adapters(model, adapters)
    merge_folder(adapters, base, merged, dtype="float32")
    loaded = load_model(merged, dtype="float32", attention="sdpa", device=CPU)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)
    assert loaded.state_dict().keys() == tiny_model().state_dict().keys()
    assert (merged / "tokenizer.json").is_file()


# ── bases of few bits ──────────────────────────────────────────────────────────────────────────────────────────────────


def quantized(folder: Path, bits: str, dtype: str = "float32") -> torch.nn.Module:
    tiny_model(hidden_size=64, intermediate_size=128, initializer_range=0.1).save_pretrained(folder)
    return load_model(folder, dtype=dtype, attention="sdpa", device=CPU, quantize=bits)


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_a_quantized_base_is_near_the_whole_one(bits, tmp_path):
    model = quantized(tmp_path, bits)
    plain = tiny_model(hidden_size=64, intermediate_size=128, initializer_range=0.1)
    gap = (logits(model) - logits(plain)).abs().mean() / logits(plain).abs().mean()
    assert 0 < gap < (0.05 if bits == "8bit" else 0.3)


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_gradients_pass_a_quantized_base(bits, tmp_path):
    """The base of the other model holds what the few bits stand for, whole: adapters must get the same gradient.

    Evaluation mode makes some CPUs pack 4-bit weights for inference, through which no gradient passes.
    """
    import bitsandbytes

    model = quantized(tmp_path, bits)
    whole = tiny_model(hidden_size=64, intermediate_size=128, initializer_range=0.1)
    logits(model)  # a forward pass without gradient comes first, as the trainer's trials do
    for name, module in list(model.named_modules()):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            weight = module.state.CB.float() * module.state.SCB[:, None] / 127
        else:
            continue
        whole.get_submodule(name).weight.data = weight.to(torch.float32)
    grads = []
    for one in (model, whole):
        add_adapters(one, rank=2, alpha=4.0, targets=None, base="x", seed=0)
        one(input_ids=IDS).logits.square().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in adapter_parameters(one)]))
    assert float(torch.cosine_similarity(grads[0], grads[1], dim=0)) > (0.9999 if bits == "4bit" else 0.99)


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_the_samples_of_a_row_don_t_change_each_other_s_weights(bits, tmp_path):
    """By default 8-bit layers keep whole columns out of the product where any token of the row is large."""
    model = quantized(tmp_path, bits)
    calm = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    layer = model.model.layers[0].mlp.up_proj
    alone = layer(calm)
    together = layer(torch.cat([calm, torch.full((1, 64), 30.0)]))[:4]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_the_bytes_of_a_quantized_base(bits, tmp_path):
    from polyturn.config.memory import frozen_tensor

    model = quantized(tmp_path, bits, "bfloat16")
    held, planned = {}, 0.0
    for name, module in model.named_modules():
        inside = isinstance(module, torch.nn.Linear) and name != "lm_head"
        for own, parameter in module.named_parameters(recurse=False):
            rows, columns = (module.out_features, module.in_features) if inside else (1, 1)
            numel = rows * columns if inside else parameter.numel()
            planned += frozen_tensor(numel, dtype="bfloat16", quantize=bits if inside else None, rows=rows).device.weights
            tensors = [parameter.data]
            if inside and bits == "8bit":
                tensors += [parameter.SCB if parameter.SCB is not None else module.state.SCB]
            elif inside:
                state = parameter.quant_state
                tensors += [state.absmax, state.code, state.state2.absmax, state.state2.code, state.offset]
            for index, tensor in enumerate(tensors):
                held[name, own, index] = tensor.numel() * tensor.element_size()
    assert sum(held.values()) == planned


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_a_copy_shares_a_quantized_base(bits, tmp_path):
    model = quantized(tmp_path, bits)
    add_adapters(model, rank=2, alpha=4.0, targets=None, base="x", seed=0)
    logits(model)
    copied = copy_for_sampling(model)
    assert torch.equal(logits(copied), logits(model))
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    assert all((one.data_ptr() == other.data_ptr()) != one.requires_grad for one, other in pairs)
    for one, other in zip(model.modules(), copied.modules(), strict=True):
        if hasattr(one, "init_8bit_state"):
            assert one.state.CB is other.state.CB
