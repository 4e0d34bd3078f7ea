"""Programs for real: every HumanEval and MBPP reference, and a tiny model that learns to repair. Needs the test data."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from parts.runs import ROOT, polyturn
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


def test_builtin_tiny_learns_to_repair(tmp_path):
    words = ("run.steps=20", "evaluation.episodes=72", "evaluation.modes=[sampled]")  # a third of the recipe's
    ended = polyturn(tmp_path, "train", str(ROOT / "recipes" / "code-tiny" / "recipe.yaml"), *words)
    assert ended.code == 0, ended.err
    before, after = (line["eval/success"] for line in ended.metrics if "eval/success" in line)
    assert before < 0.5
    assert after > before + 0.25
    assert all(step["num_faults"] == 0 for step in ended.steps)
