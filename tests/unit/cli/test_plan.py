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


def test_no_torch_is_loaded(recipe):
    ended = run_python(
        "import sys; from polyturn.cli.main import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)",
        *["plan", recipe, "--gpu", "h200"],
    )
    assert ended.code == 0, ended.err
