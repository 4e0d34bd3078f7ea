"""A run that is started with another tool's file beside its recipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parts.runs import ROOT, child_environment
from polyturn.config.load import load_recipe

pytestmark = pytest.mark.real

FILES = ROOT / "tests" / "data" / "convert"
QUICKLY = ("run.steps=2", "rollout.groups_per_step=2", "rollout.group_size=2", "evaluation.episodes=2")


@pytest.mark.parametrize(("file", "dtype"), [("accelerate_fsdp2.yaml", "float32"), ("accelerate_deepspeed.yaml", "bfloat16")])
def test_two_ranks_train_by_a_yaml_of_accelerate(tmp_path: Path, file, dtype):
    recipe = ROOT / "recipes" / "quickstart" / "recipe.yaml"
    words = ("--from", str(FILES / file), "engine.kind=hf_server", "trainer.device=cpu", f"run.output_dir={tmp_path}", *QUICKLY)
    argv = [sys.executable, "-m", "polyturn", "train", str(recipe), *words]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=400, env=child_environment(), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "num_processes: 2 is trainer.num_ranks=2\n" in ended.stdout
    folder = tmp_path / "quickstart"
    kept = load_recipe(folder / "recipe.yaml")
    assert (kept.trainer.num_ranks, kept.trainer.parallel, kept.model.dtype) == (2, "fsdp2", dtype)
    assert (folder / "export" / "model.safetensors").is_file()
