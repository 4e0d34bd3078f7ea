"""Programs for real: every HumanEval and MBPP reference, a tiny model that learns to repair, SmolLM2 on rows of MBPP.

Needs the test data; the last one also the packages of `make smollm2`. Ten minutes on two idle cores.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parts.runs import ROOT, Ended, child_environment, read_jsonl
from polyturn.environments.builtin.python_code import PythonCode
from polyturn.environments.contract import play_by_hand
from polyturn.loop.tasks import tasks_from_file
from polyturn.sandbox.base import Limits
from polyturn.sandbox.local import LocalSandbox

pytestmark = pytest.mark.real

SETS = {"humaneval": 164, "mbpp_sanitized": 427}


@pytest.mark.parametrize("mode", ["single", "multi"])
@pytest.mark.parametrize("name", SETS)
async def test_references_score_full_marks_and_silence_none(name, mode):
    sandbox = LocalSandbox(Limits(wall_s=60, cpu_s=60))
    environment = PythonCode(sandbox=sandbox, mode=mode)
    tasks = tasks_from_file(str(Path(os.environ["POLYTURN_DATA"]) / "code" / f"{name}.jsonl"), environment)
    assert tasks.size == SETS[name]
    await sandbox.start()
    try:
        for replies, score in ((environment.gold, 1), (lambda task: [""], 0)):
            played = [play_by_hand(environment, task, replies(task)) for task in (tasks[n] for n in range(SETS[name]))]
            episodes = await asyncio.gather(*played)
            assert [episode.task.id for episode in episodes if episode.score != score] == []
    finally:
        await sandbox.stop()


def polyturn(folder: Path, *argv: str) -> Ended:
    """A command in a process of its own, with a cache of its own."""
    words = [sys.executable, "-m", "polyturn", *argv, f"run.output_dir={folder / 'runs'}"]
    environment = child_environment(POLYTURN_CACHE=str(folder / "cache"), OMP_NUM_THREADS="2")
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800, env=environment, cwd=ROOT)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_builtin_tiny_learns_to_repair(tmp_path):
    ended = polyturn(tmp_path, "train", str(ROOT / "recipes" / "code-tiny" / "recipe.yaml"))
    assert ended.code == 0, ended.err
    before, after = (line["eval/success"] for line in ended.metrics if "eval/success" in line)
    assert before < 0.5
    assert after > before + 0.25
    assert all(step["num_faults"] == 0 for step in ended.steps)


def test_smollm2_writes_programs_that_are_run(tmp_path):
    ended = polyturn(tmp_path, "train", str(ROOT / "recipes" / "code" / "recipe.yaml"), "evaluation.episodes=2")
    assert ended.code == 0, ended.err
    assert [step["step"] for step in ended.steps] == [1, 2]
    assert all(step["num_faults"] == 0 for step in ended.steps)
    learned = [step for step in ended.steps if step["num_trained_tokens"]]
    assert learned, "every group's advantages were 0, so that nothing was shown"
    for step in learned:
        assert math.isfinite(step["loss"])
        assert step["mismatch_max"] < 1e-4
    rows = [row for path in sorted((ended.folder / "trajectories").iterdir()) for row in read_jsonl(path)]
    turns = [turn for row in rows for turn in row["turns"]]
    assert any(turn["counts"].get("runs") for turn in turns), "some program was run"
    asked = rows[0]["task"]["messages"][-1]["content"]
    assert asked.count("assert ") == 1, "one test is shown, the others are not"
