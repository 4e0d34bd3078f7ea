"""`polyturn plan`: tables, verdicts and exit codes, without torch."""

from __future__ import annotations

import json

import pytest

from parts.runs import run_python
from polyturn.cli.main import main

RECIPE = """
run: {steps: 4}
model: {path: qwen2.5-7b, dtype: bfloat16}
environment: {id: lookup}
rollout: {max_trajectory_tokens: 4096}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


def test_what_does_not_fit_ends_with_2_and_the_nearest_that_does(recipe, capsys):
    assert main(["plan", recipe, "--instance", "ml.p4d.24xlarge"]) == 2
    shown = capsys.readouterr().out
    assert "Qwen/Qwen2.5-7B, 7,615,616,512 parameters" in shown
    assert "8 x a100-40gb of 39.5 GiB (measured), NVLink, $25.25 an hour on 2026-01-21" in shown
    assert "does not fit: trainer-0 and the engine: " in shown
    assert "without end" not in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("nearest that fits there: ")]
    overrides = line.removeprefix("nearest that fits there: ").split()
    assert overrides
    assert main(["plan", recipe, "--instance", "ml.p4d.24xlarge", *overrides]) == 0
    assert "fits: 1 x " in capsys.readouterr().out


def test_json(recipe, capsys):
    assert main(["plan", recipe, "--gpu", "h200", "--gpus", "2", "--json", "model.path=builtin:smollm2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["problems"] == []
    assert found["machine"]["gpus"] == 2
    assert found["machine"]["price_per_hour"] is None
    (gpu,) = found["gpus"]
    always = sum(term["bytes"] for term in gpu["terms"] if term["phase"] == "always")
    training = sum(term["bytes"] for term in gpu["terms"] if term["phase"] == "training")
    generating = sum(term["bytes"] for term in gpu["terms"] if term["phase"] == "generating")
    assert gpu["needed_bytes"] == pytest.approx(always + max(training, generating), abs=len(gpu["terms"]))
    assert found["batch"]["trajectories_per_step"] == 128


def test_without_a_machine_it_names_the_smallest_gpu(recipe, capsys):
    assert main(["plan", recipe, "model.path=qwen2.5-0.5b", "trainer.activations=selective", "engine.max_batch_size=32"]) == 0
    assert "the smallest known kind of GPU on which it fits as it is: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--instance", "p4d.24xlrge"], "did you mean p4d.24xlarge?"),
        (["--gpu", "a100-40g"], "did you mean a100-40gb?"),
        (["--gpus", "2"], "name it with --gpu"),
        (["--nodes", "2"], "of which machine"),
        (["--gpu", "a10g", "--nodes", "0"], "from 1 to 1,024"),
        (["--gpu", "a10g", "--nodes", "-3"], "from 1 to 1,024"),
        (["--budget-per-hour", "0"], "give dollars above 0"),
        (["--budget-per-hour", "nan"], "give dollars above 0"),
        (["--fill", "2"], "above 0 and at most 1"),
        (["--prefer", "speed"], "on which machine"),
        (["--context", "100"], "rollout.max_trajectory_tokens=N"),
        (["--suggest", "qwen2.5-7b"], "leave recipe out"),
        (["data.path=nowhere.jsonl"], "nowhere.jsonl"),
        (["--gpu", "a10g", "--gpus", "0"], "from 1 to 1,024"),
        (["--gpu", "a10g", "--instance", "p4d.24xlarge"], "leave --gpu and --gpus out"),
        (["--tasks", "0"], "give 1 or more"),
        (["--hardware", "nowhere.yaml"], "can't be read"),
        (["model.path=Qwen/Qwen2.5-8B"], "did you mean Qwen/Qwen2.5-"),
        (["run.epochs=1"], "with --tasks N"),
    ],
)
def test_mistakes_are_one_sentence(recipe, capsys, words, sentence):
    assert main(["plan", recipe, *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert sentence in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name a recipe, or a model with --suggest"),
        (["--suggest", "qwen2.5-8b"], "did you mean qwen2.5-"),
        (["--suggest", "qwen2.5-7b", "--context", "0"], "from 64 to"),
        (["--suggest", "qwen2.5-7b", "--context", "200000"], "131,072 positions; give at most as many"),
        (["--suggest", "qwen2.5-7b", "--group-size", "1"], "from 2 to"),
        (["--suggest", "qwen2.5-7b", "--instance", "p4d.24xlarge"], "leave instance out"),
    ],
)
def test_mistakes_without_a_recipe(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["plan", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert sentence in said.err
    assert said.err.count("\n") == 1


def test_the_whole_report_of_a_split_node(recipe, capsys):
    words = ["engine.kind=vllm_server", "trainer.num_ranks=7", "model.path=qwen2.5-1.5b", "--tasks", "2048"]
    assert main(["plan", recipe, "--instance", "p4de.24xlarge", *words]) == 0
    shown = capsys.readouterr().out
    for piece in (
        "GPU 7   [",
        "weight_sync.mode=nccl, because ",
        "KV cache ",
        "In other words: num_generations=8",
        "s a step, an estimate for trajectories that reach 50% of their limits",
        "$27.45 an hour (list price of 2026-01-21, on demand)",
        "An epoch of 2,048 tasks is 128 steps",
        "splits of the 8 GPUs, trainer + engines",
        "as planned",
        "fits: 8 x ",
    ):
        assert piece in shown, piece


def test_the_rows_of_a_file_are_the_tasks(recipe, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "a", "answer": "b"}\n' * 48, encoding="utf-8")
    assert main(["plan", recipe, "--gpu", "b300", f"data.path={data}", "run.steps=null", "run.epochs=2"]) == 0
    assert "An epoch of 48 tasks is 3 steps" in capsys.readouterr().out


def test_nodes_multiply_gpus_and_price(recipe, capsys):
    words = ["--instance", "p4de.24xlarge", "--nodes", "2", "engine.kind=vllm_server", "trainer.num_ranks=12"]
    assert main(["plan", recipe, *words, "model.path=qwen2.5-1.5b", "engine.num_servers=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["nodes"] == 2
    assert found["machine"]["price_per_hour"] == pytest.approx(2 * 27.45)
    assert sum(gpu["count"] for gpu in found["gpus"]) == 16
    assert found["time"]["seconds"] == pytest.approx(sum(part["seconds"] for part in found["time"]["parts"]), abs=0.01)
    assert found["gpus"][1]["engine"]["tokens"] > 0


def test_a_machine_above_the_budget_ends_with_2(recipe, capsys):
    words = ["plan", recipe, "--instance", "p4de.24xlarge", "model.path=qwen2.5-0.5b"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--budget-per-hour", "10"]) == 2
    assert "--budget-per-hour=10: p4de.24xlarge costs $27.45 an hour" in capsys.readouterr().out


def test_a_budget_alone_names_machines(recipe, capsys):
    assert main(["plan", recipe, "--budget-per-hour", "10"]) == 0
    shown = capsys.readouterr().out
    assert "g6.12xlarge" in shown
    assert "p4d.24xlarge" not in shown
    assert main(["plan", recipe, "--budget-per-hour", "0.1"]) == 2
    assert "nothing known makes it fit for $0.1 an hour" in capsys.readouterr().out


def test_preferences_say_what_they_changed(recipe, capsys):
    words = ["plan", recipe, "--instance", "p4de.24xlarge", "engine.kind=vllm_server", "model.path=qwen2.5-1.5b"]
    assert main([*words, "--prefer", "speed"]) == 0
    shown = capsys.readouterr().out
    assert "--prefer speed: trainer.num_ranks 1 -> " in shown
    assert main([*words, "--prefer", "speed", "--json"]) == 0
    assert any(change.startswith("trainer.num_ranks=") for change in json.loads(capsys.readouterr().out)["changed"])


def test_suggestions(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["plan", "--suggest", "qwen2.5-7b", "--context", "8192", "--group-size", "8"]) == 0
    shown = capsys.readouterr().out
    assert "trajectories of 8,192 tokens, 16 groups of 8 a step" in shown
    assert "cheapest: " in shown
    assert main(["plan", "--suggest", "qwen2.5-7b", "--json", "--budget-per-hour", "30"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(one["machine"]["price_per_hour"] <= 30 for one in found)


def test_no_torch_is_loaded(recipe):
    ended = run_python(
        "import sys; from polyturn.cli.main import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)",
        *[
            "plan",
            recipe,
            "--gpu",
            "h200",
            "--gpus",
            "4",
            "--prefer",
            "speed",
            "engine.kind=vllm_server",
            "trainer.memory=auto",
        ],
    )
    assert ended.code == 0, ended.err
