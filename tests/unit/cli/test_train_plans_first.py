"""`polyturn train` on a machine whose driver reports GPUs: the plan comes first, and what does not fit is refused."""

from __future__ import annotations

import os

import pytest

from polyturn.cli.main import main

RECIPE = """
run: {{steps: 4, output_dir: {folder}}}
model: {{path: Qwen/Qwen2.5-3B, dtype: bfloat16}}
environment: {{id: lookup}}
rollout: {{max_trajectory_tokens: 2048}}
engine: {{max_batch_size: 16}}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(folder=tmp_path / "runs"), encoding="utf-8")
    return str(path)


@pytest.fixture
def one_gpu(tmp_path, monkeypatch):
    """A machine with one GPU, as far as its driver's tool says."""

    def made(name: str, mib: int) -> None:
        tools = tmp_path / "bin"
        tools.mkdir()
        tool = tools / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho '0, GPU-aaaa, {name}, {mib}, 500'\n", encoding="utf-8")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    return made


def test_what_does_not_fit_is_refused_unless_forced(recipe, one_gpu, capsys):
    one_gpu("NVIDIA A10G", 23028)
    assert main(["train", recipe, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert "does not fit here: trainer-0 and the engine: " in said.err
    assert "--force tries it anyway" in said.err
    assert main(["train", recipe, "--dry-run", "--force"]) == 0
    assert "is tried because of --force" in capsys.readouterr().out


def test_so_it_is_with_several_processes(recipe, one_gpu, capsys):
    one_gpu("NVIDIA A10G", 23028)
    words = ["launch", "local", recipe, "--dry-run", "environment.num_processes=1"]
    assert main(words) == 2
    assert "does not fit here" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0


def test_what_fits_is_said(recipe, one_gpu, capsys):
    one_gpu("NVIDIA B200", 183359)
    assert main(["train", recipe, "--dry-run"]) == 0
    assert "GiB planned (b200)" in capsys.readouterr().out


def test_auto_is_in_the_resolved_recipe_with_its_reason(recipe, one_gpu, tmp_path, capsys):
    one_gpu("NVIDIA A100-SXM4-80GB", 81920)
    assert main(["train", recipe, "--dry-run"]) == 2
    assert main(["train", recipe, "--dry-run", "trainer.memory=auto"]) == 0
    resolved = (tmp_path / "runs" / "run.resolved.yaml").read_text(encoding="utf-8")
    assert "# trainer.memory=auto: " in resolved
    assert "activations: keep" not in resolved
    capsys.readouterr()
    again = str(tmp_path / "runs" / "run.resolved.yaml")
    assert main(["train", again, "--dry-run", "run.name=again"]) == 0
    assert "does not fit" not in capsys.readouterr().err


def test_without_a_gpu_nothing_is_said(recipe, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["train", recipe, "--dry-run"]) == 0
    assert "planned" not in capsys.readouterr().out
