"""Adapters by the command line: trained, exported, evaluated with their base, merged by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parts.environments import PATTERN, WORDS
from parts.models import save_model_folder
from polyturn.models.load import load_model, merge_folder

pytestmark = pytest.mark.real  # the quick tests do without peft

FAST = ["rollout.groups_per_step=4", "evaluation.episodes=4", "trainer.learning_rate=0.02", "model.lora.rank=4"]
# One colour, to be said exactly in both of two turns: one in 256 by chance.
LEARN = ["run.steps=25", "rollout.group_size=16", "rollout.groups_per_step=8", "trainer.learning_rate=0.01"]
LEARN += ["environment.args.colours=1", "environment.args.held_out=32", "evaluation.episodes=32", "model.lora={rank: 16}"]
LEARN += ["evaluation.modes=[sampled, greedy]"]


@pytest.fixture
def sharp_model(tmp_path: Path) -> Path:
    """A random model whose head, which adapters leave alone, is large enough for certainty."""
    return save_model_folder(tmp_path / "sharp", WORDS, PATTERN, initializer_range=0.3, tie_word_embeddings=False)


def test_adapters_learn_and_what_is_exported_is_what_was_evaluated(bench, sharp_model):
    words = [*LEARN, f"model.path={sharp_model}"]
    ended = bench("train", *words)
    assert ended.code == 0, ended.err
    before, after = (line["eval/success"] for line in ended.metrics if "eval/success" in line)
    assert before < 0.1
    assert after > 0.8, "measured over 24 seeds: 0.97 to 1"
    export = ended.folder / "export"
    files = {path.name: path.stat().st_size for path in export.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files.keys()
    assert not {"config.json", "model.safetensors"} & files.keys()
    assert json.loads((export / "adapter_config.json").read_text())["base_model_name_or_path"] == str(sharp_model)
    again = bench("eval", "--model", str(export), *words)
    assert again.code == 0, again.err
    told = [line.rpartition("after ")[2] for line in ended.out.splitlines() if line.startswith("held-out success")]
    assert len(told) == 2
    assert all(success in again.out for success in told), (told, again.out)
    base = bench("eval", *words)
    assert not any(success in base.out for success in told), "its base alone is not that good"


@pytest.mark.parametrize(
    "words",
    [
        ["model.dtype=bfloat16"],
        ["model.dtype=bfloat16", "trainer.master_weights=stochastic", "trainer.optimizer=adamw_8bit"],
        ["model.dtype=bfloat16", "trainer.offload_optimizer=true"],
        ["algorithm.loss_options.beta=0.1", "trainer.num_iterations=2"],
        ["model.quantize=8bit", "weight_sync.max_mismatch=0.5"],
        ["model.quantize=4bit", "model.dtype=bfloat16", "weight_sync.max_mismatch=0.5"],
    ],
    ids=" ".join,
)
def test_every_way_to_save_memory_runs(bench, words):
    ended = bench("train", *FAST, *words)
    assert (ended.code, ended.err) == (0, "")
    assert len(ended.steps) == 2
    exact = "model.dtype=bfloat16" not in words and not any("quantize" in word for word in words)
    assert all(line["mismatch"] < (1e-4 if exact else 0.1) for line in ended.steps)


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.optimizer=adamw_8bit"],
        ["model.dtype=bfloat16"],
        ["model.dtype=bfloat16", "trainer.master_weights=stochastic"],
        ["trainer.offload_optimizer=true"],
        ["algorithm.loss_options.beta=0.1", "trainer.reference_device=cpu"],
    ],
    ids=" ".join,
)
def test_so_does_each_of_those_for_whole_models(bench, words):
    ended = bench("train", *FAST[:-1], *words)
    assert (ended.code, ended.err) == (0, "")
    assert len(ended.steps) == 2


def test_builtin_bases_are_named_by_their_name(bench):
    words = ["environment.id=lookup", "environment.args={level: chain, max_hops: 2, instructions: false}", "run.steps=1"]
    words += ["model.path=builtin:tiny", "model.lora={rank: 4}", "rollout.group_size=4", "rollout.groups_per_step=2"]
    words += ["rollout.max_turns=3", "rollout.max_turn_tokens=8", "rollout.max_trajectory_tokens=128", "evaluation.episodes=4"]
    ended = bench("train", *words)
    assert ended.code == 0, ended.err
    export = ended.folder / "export"
    assert json.loads((export / "adapter_config.json").read_text())["base_model_name_or_path"] == "builtin:tiny"
    assert bench("eval", "--model", str(export), *words).code == 0


def test_what_starts_from_a_whole_model_refuses_adapters(bench, tmp_path):
    export = bench("train", *FAST).folder / "export"
    for argv, says in (
        (["train", f"model.path={export}"], "training starts from a whole model"),
        (["warmstart", "--out", str(tmp_path / "out"), f"model.path={export}"], "trains all weights of a whole model"),
        (["warmstart", "--out", str(tmp_path / "out"), "model.lora={}"], "trains all weights of a whole model"),
    ):
        ended = bench(*argv)
        assert ended.code == 2
        assert says in ended.err
        assert ended.err.count("\n") == 1


def test_a_merged_export_is_an_ordinary_model(bench, colours_model, tmp_path):
    export = bench("train", *FAST).folder / "export"
    merged = tmp_path / "merged"
    merge_folder(export, colours_model, merged, dtype="float32")
    base, whole = (
        load_model(Path(folder), dtype="float32", attention="sdpa", device=torch.device("cpu"))
        for folder in (colours_model, merged)
    )
    assert base.state_dict().keys() == whole.state_dict().keys()
    assert bench("eval", "--model", str(merged)).code == 0
