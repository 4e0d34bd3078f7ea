"""Loading what is whole and refusing the rest; exporting what transformers loads."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from parts.environments import PATTERN, WORDS
from parts.models import same_bits, save_model_folder, tiny_model
from polyturn.errors import ModelError
from polyturn.models.folder import TINY_POSITIONS, local_folder, max_positions, model_folder
from polyturn.models.load import export_model, load_model
from polyturn.models.tiny import build_tiny
from polyturn.rendering.renderer import Renderer
from polyturn.rendering.words import TINY_CHAT_TEMPLATE
from polyturn.types import Message

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    return save_model_folder(tmp_path / "model", WORDS, PATTERN)


def load(folder, dtype="float32", attention="sdpa"):
    return load_model(folder, dtype=dtype, attention=attention, device=CPU)


# ── finding the folder ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_is_itself(folder):
    assert local_folder(str(folder)) == model_folder(str(folder)) == folder


def test_a_home_folder_may_be_written_with_a_tilde(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert local_folder("~/model") == folder


@pytest.mark.parametrize("path", ["./gone", "/gone/model", "~/gone", "gone", "a/b/c", "owner/", "/x"])
def test_a_path_that_is_no_folder_and_no_id(path):
    with pytest.raises(ModelError, match=r"does not exist; give a folder, a hub id such as owner/name, or builtin:tiny"):
        local_folder(path)


def test_a_hub_id_is_not_looked_up():
    assert local_folder("owner/name") is None


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        local_folder(str(tmp_path))


def test_an_id_that_the_hub_does_not_give(monkeypatch):
    asked = []

    def refuse(path, **given):
        asked.append((path, given.get("local_files_only", False)))
        raise OSError("no such repository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"owner/name is neither a folder here nor in the local hub cache.*no such repository"):
        model_folder("owner/name")
    assert asked == [("owner/name", True), ("owner/name", False)], "the cache first"


def test_an_id_in_the_cache_is_not_asked_for(monkeypatch, folder):
    def give(path, *, local_files_only=False, **_):
        assert local_files_only
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", give)
    assert model_folder("owner/name") == folder


@pytest.mark.parametrize(("config", "longest"), [({"max_position_embeddings": 77}, 77), ({}, None), ([], None)])
def test_max_positions(tmp_path, config, longest):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert max_positions(tmp_path) == longest


def test_a_config_that_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        max_positions(tmp_path)


# ── loading ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_load_gives_what_was_asked_for(folder, dtype, attention):
    model = load(folder, dtype, attention)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert model.config._attn_implementation == attention


def test_missing_weights_are_refused_not_made_up(folder):
    """transformers warns and fills them with random numbers, and training would go on from there."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 weights of a LlamaForCausalLM, first model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_tied_embeddings_are_not_missing(folder):
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert load(folder).get_parameter("lm_head.weight") is not None


@pytest.mark.parametrize("content", [None, b"", b"not a checkpoint"])
def test_a_broken_checkpoint_is_a_sentence(folder, content):
    file = folder / "model.safetensors"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ModelError, match="transformers could not load"):
        load(folder)


# ── exporting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_an_ordinary_folder(tmp_path, tied):
    source = save_model_folder(tmp_path / "source", WORDS, PATTERN, tie_word_embeddings=tied)
    model = load(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    export_model(model, source, tmp_path / "deep" / "export")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "export", local_files_only=True)
    assert same_bits(dict(again.named_parameters()), dict(model.named_parameters()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "deep" / "export", local_files_only=True)
    ids = tokenizer("say red<|end|>", add_special_tokens=False)["input_ids"]
    assert tuple(ids) == Renderer.load(source).tokenizer.encode("say red<|end|>")
    assert tokenizer.eos_token == "<|end|>"


def test_an_export_can_be_trained_from(tmp_path, folder):
    export_model(load(folder), folder, tmp_path / "export")
    task = (Message(role="user", content="say red"),)
    first, again = (Renderer.load(path).open(task).prompt().ids for path in (folder, tmp_path / "export"))
    assert first == again


def test_the_template_that_was_trained_with_goes_along(tmp_path, folder):
    template = tmp_path / "mine.jinja"
    template.write_text(TINY_CHAT_TEMPLATE.replace("'<|assistant|>'", "'<|assistant|>red '"))
    (folder / "chat_template.json").write_text('{"chat_template": "old"}')
    export_model(load(folder), folder, tmp_path / "export", chat_template=template)
    task = (Message(role="user", content="say red"),)
    exported = Renderer.load(tmp_path / "export").open(task).prompt().ids
    assert exported == Renderer.load(folder, chat_template=template).open(task).prompt().ids
    assert exported != Renderer.load(folder).open(task).prompt().ids
    assert (folder / "chat_template.jinja").read_text() == TINY_CHAT_TEMPLATE, "the source is left alone"


def test_exporting_onto_its_own_folder(folder):
    model = tiny_model(vocab_size=Renderer.load(folder).tokenizer.vocab_size)
    export_model(model, folder, folder)
    assert same_bits(load(folder).state_dict(), model.state_dict())


def test_files_that_a_folder_does_not_have_are_not_missed(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    export_model(load(folder), tmp_path / "bare", tmp_path / "export")
    assert not (tmp_path / "export" / "chat_template.jinja").exists()


# ── builtin:tiny ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = (build_tiny(vocab_size=20, eos_id=4, pad_id=4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert same_bits(one.state_dict(), two.state_dict())
    assert not same_bits(one.state_dict(), other.state_dict())


def test_tiny_is_what_its_docstring_says():
    model = build_tiny(vocab_size=100, eos_id=4, pad_id=4, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 100 * 128 + 2 * (4 * 128**2 + 3 * 128 * 256 + 2 * 128) + 128
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.num_attention_heads) == (128, 2, 4)
    assert model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == TINY_POSITIONS
    assert {p.dtype for p in model.parameters()} == {torch.float32}
