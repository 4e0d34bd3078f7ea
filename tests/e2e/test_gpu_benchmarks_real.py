"""The benchmarks for GPU machines, tried on a CPU with the smallest models: they come to their end, and find what is so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from parts.runs import ROOT
from parts.vllm_served import needs_vllm

pytestmark = needs_vllm
LIMIT_S = 600


def run(script: str, out: Path, *words: str, **variables: str) -> dict[str, Any]:
    """The cases of a result."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--out", str(out), "--limit-s", str(LIMIT_S), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(out.read_text())["cases"]
    for name, one in found.items():
        assert not one.keys() & {"failed", "cut_off", "not_run"}, (name, one)
    return found


def test_engines(tmp_path):
    cases = ("vllm/single_copy", "vllm_server/single_copy", "vllm/rollout_ways")
    found = run("gpu_engines.py", tmp_path / "engines.json", "--small", "--model", "builtin:tiny", "--cases", *cases)
    one = found["vllm/single_copy"]
    assert one["coverage"] == 1.0
    assert one["tensors"] == one["checksums_equal"] == one["shared_tensors"] > 0
    assert one["greedy_right"]
    assert one["last_gap"] < 1e-4
    assert one["fixed_tokens_per_s"] > 0
    assert one["rollout_of_raw_within"] is not None
    ways = found["vllm/rollout_ways"]["ways"]
    assert ways["vllm"]["of_vllm"] == 1.0
    assert all(one["seconds"] >= one["in_steps_s"] > 0 for one in ways.values())
    server = found["vllm_server/single_copy"]
    assert "skipped" in server or server["checksums_equal"] == server["tensors"]


def test_pushes(tmp_path):
    found = run("push_nccl.py", tmp_path / "push.json", "--cases", "deep", "--pushes", "3")["deep"]
    assert (found["backend"], found["checksums_compared"], len(found["pushes"])) == ("gloo", 2, 4)
    middle = found["median"]
    assert middle["pause_to_resume_s"] <= middle["whole_s"]
    assert middle["update"] > 0


def test_planner(tmp_path):
    cases = ("train/tiny", "train/tiny/lora4", "engine/tiny")
    found = run("planner_gpu.py", tmp_path / "planner.json", "--cases", *cases)
    assert all(found[name]["ran"] for name in cases)
    assert all(found[name]["planned_gib"] >= 0 for name in cases)


def test_placements(tmp_path):
    names = ("one server/wide", "two shards/tiny/float32")
    empty = str(tmp_path / "cache")  # as on a machine that is lent: the model has to be made
    found = run(
        "placements.py", tmp_path / "placements.json", "--small", "--steps", "2", "--cases", *names, XDG_CACHE_HOME=empty
    )
    for one in map(found.__getitem__, names):
        assert (one["code"], one["steps"], one["policy_version"], one["policy_age"]) == (0, 2, 2, 0)
        assert one["mismatch_max"] < 1e-4
        assert one["push_s"] > 0
