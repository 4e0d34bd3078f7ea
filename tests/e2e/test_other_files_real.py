"""A run that is started with another tool's file beside its recipe, and goes on from its checkpoint."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from parts.runs import ROOT, child_environment
from polyturn.config.load import load_recipe
from polyturn.storage.retention import stored_steps
from polyturn.storage.stores import LocalStore

pytestmark = pytest.mark.real

FILES = ROOT / "tests" / "data" / "convert"
QUICKLY = ("rollout.groups_per_step=4", "rollout.group_size=4", "evaluation.episodes=2", "checkpoint.every.disk=1")
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"
)


@pytest.mark.parametrize(
    ("file", "parallel", "dtype"),
    [
        ("accelerate_fsdp2.yaml", "fsdp2", "float32"),
        pytest.param("accelerate_deepspeed.yaml", "deepspeed", "bfloat16", marks=needs_deepspeed),
    ],
)
def test_two_ranks_train_by_a_yaml_of_accelerate_and_go_on(tmp_path: Path, file, parallel, dtype):
    recipe = ROOT / "recipes" / "quickstart" / "recipe.yaml"
    words = ("--from", str(FILES / file), "engine.kind=hf_server", "trainer.device=cpu", f"run.output_dir={tmp_path}", *QUICKLY)

    def train(*more: str) -> str:
        argv = [
            sys.executable,
            "-m",
            "polyturn",
            "train",
            str(recipe),
            *words,
            "trainer.schedule=constant",
            "trainer.warmup_steps=0",
            *more,
        ]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=400, env=child_environment(), cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "num_processes: 2 is trainer.num_ranks=2\n" in train("run.steps=2")
    assert "goes on after step 2" in train("run.steps=4", "--resume")
    folder = tmp_path / "quickstart"
    kept = load_recipe(folder / "recipe.yaml")
    assert (kept.trainer.num_ranks, kept.trainer.parallel, kept.model.dtype) == (2, parallel, dtype)
    store = LocalStore(folder / "checkpoints")
    assert max(stored.step for stored in stored_steps(store, "quickstart") if stored.has_manifest) == 4
    assert (folder / "export" / "model.safetensors").is_file()
