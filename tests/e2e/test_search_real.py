"""A real model on real questions with a real index: SmolLM2-135M, two steps on a CPU, then `eval` on rows held out.

Needs the packages of `make smollm2` and of the extra `search`. Three minutes on two idle cores.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parts.runs import ROOT, Ended, child_environment, read_jsonl
from polyturn.models.smollm2 import ensure_smollm2

pytestmark = pytest.mark.real

RECIPE = ROOT / "recipes" / "search-qa" / "recipe.yaml"
SMALL = ("rollout.groups_per_step=2", "evaluation.episodes=0")
TASKS = {"test": ("--split", "test"), "other": ("--data", "tests/data/qa_trivia_no_support_4.jsonl")}


@pytest.fixture(scope="module")
def polyturn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ended]]:
    """Commands in processes of their own, with a cache that goes at the end."""
    folder = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYTURN_CACHE", str(folder / "cache"))
        ensure_smollm2(lambda _: None)

    def run(*argv: str) -> Ended:
        words = [sys.executable, "-m", "polyturn", *argv, f"run.output_dir={folder / 'runs'}"]
        environment = child_environment(POLYTURN_CACHE=str(folder / "cache"), OMP_NUM_THREADS="2")
        done = subprocess.run(words, capture_output=True, text=True, timeout=1500, env=environment, cwd=ROOT)
        return Ended(done.returncode, done.stdout, done.stderr)

    yield run
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def trained(polyturn) -> Ended:
    ended = polyturn("train", str(RECIPE), *SMALL)
    assert ended.code == 0, ended.err
    return ended


def test_two_steps_are_finite_and_on_policy(trained):
    assert [step["step"] for step in trained.steps] == [1, 2]
    for step in trained.steps:
        assert step["num_faults"] == 0
        if step["num_trained_tokens"]:
            assert math.isfinite(step["loss"])
            assert step["mismatch_max"] < 1e-4


def test_it_searched_in_real_paragraphs(trained):
    rows = [row for step in (1, 2) for row in read_jsonl(trained.folder / "trajectories" / f"step_00000{step}.jsonl")]
    assert len(rows) == 16
    assert all(row["outcome"].keys() == {"answer", "format", "f1", "answer_in_results"} for row in rows)
    replies = [message["content"] for row in rows for turn in row["turns"] for message in turn["reply"]]
    assert any(reply.startswith("<information>\n[1] ") for reply in replies), "nobody searched"


@pytest.mark.parametrize("tasks", TASKS)
def test_eval_reports_what_question_answering_is_measured_by(trained, polyturn, tasks, tmp_path):
    out = tmp_path / "said.jsonl"
    words = ("--model", str(trained.folder / "export"), "--episodes", "3", "--out", str(out), "--json")
    ended = polyturn("eval", str(RECIPE), *TASKS[tasks], *words)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)["greedy"]
    names = {"outcome/answer", "outcome/f1", "outcome/answer_in_results", "turns_per_trajectory"}
    assert {f"eval_greedy/{name}" for name in names} <= found.keys()
    assert len(read_jsonl(out)) == 3


def test_the_whole_set_can_be_searched(polyturn, tmp_path):
    data = Path(os.environ["POLYTURN_DATA"]) / "qa_trivia"
    words = (f"data.path={data / 'train.jsonl'}", f"data.eval_path={data / 'test.jsonl'}")
    corpus = f"environment.args.corpus={data / 'corpus.jsonl.gz'}"
    out = tmp_path / "said.jsonl"
    ended = polyturn("eval", str(RECIPE), "--split", "test", "--episodes", "2", "--out", str(out), *words, corpus)
    assert ended.code == 0, ended.err
    assert "answer_in_results" in ended.out
    assert all("qa_trivia/test.jsonl:" in row["task"]["id"] for row in read_jsonl(out))
