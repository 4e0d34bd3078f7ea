"""SmolLM2 on rows of MBPP: needs the test data, and the packages of `make smollm2`."""

from __future__ import annotations

import math

import pytest

from parts.runs import ROOT, polyturn, read_jsonl

pytestmark = pytest.mark.real


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
