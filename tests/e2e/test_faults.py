"""Things that go wrong during a run: it goes on, or ends with the right code and a sentence, and never hangs."""

from __future__ import annotations

import pytest
import torch
import transformers

from parts.patience import PATIENCE_S
from parts.runs import run_python
from polyturn.engine.hf import HfEngine
from polyturn.models.load import export_model
from polyturn.rollouts.record import read_trajectories

EIGHT = ["rollout.group_size=8", "rollout.max_dropped_share=0.2", "evaluation.episodes=0"]


def by_validity(ended, step):
    found = list(read_trajectories(ended.folder / "trajectories" / f"step_{step:06d}.jsonl"))
    return [t for t in found if t.valid], [t for t in found if not t.valid]


def test_one_sibling_of_eight_crashes(bench):
    ended = bench("train", "environment.id=parts.environments:OneCrashes", *EIGHT)
    assert (ended.code, ended.err) == (0, "")
    for step, line in enumerate(ended.steps, 1):
        assert (line["num_faults"], line["dropped_share"]) == (2, 2 / 16)
        kept, lost = by_validity(ended, step)
        assert (len(kept), len(lost)) == (14, 2)
        for trajectory in lost:
            assert trajectory.fault == "colours.step raised RuntimeError: the sandbox is gone"
            assert trajectory.outcome_reward is None
            assert len(trajectory.turns) == 2, "what the model said before the crash is on record"
        # Masked: the batch holds the tokens of the others only.
        assert line["num_trained_tokens"] == sum(t.num_completion_tokens for t in kept)
        assert line["reward"] == pytest.approx(sum(t.total_reward for t in kept) / 14)


def test_a_reward_function_that_raises(bench):
    ended = bench("train", "environment.id=parts.environments:RewardRaises", *EIGHT)
    assert ended.code == 0
    assert [line["num_faults"] for line in ended.steps] == [2, 2]
    _, lost = by_validity(ended, 2)
    assert {t.fault for t in lost} == {"colours.rewards raised KeyError: 'score'"}
    assert all(t.outcome == {} for t in lost), "no reward is not a reward of 0"


def test_a_coroutine_that_never_returns(bench):
    ended = bench("train", "environment.id=parts.environments:CoroutineHangs", "rollout.tool_deadline_s=0.3", *EIGHT)
    assert (ended.code, ended.err) == (0, "")
    assert_hung(ended)


@pytest.mark.real
def test_a_tool_that_never_returns(bench):
    """In a process of its own: its thread must not keep the process from ending either."""
    words = ["environment.id=parts.environments:ToolHangs", "rollout.tool_deadline_s=0.3", *EIGHT]
    ended = bench.process("train", *words, timeout_s=PATIENCE_S)
    assert (ended.code, ended.err) == (0, "")
    assert_hung(ended)


def assert_hung(ended):
    for step, line in enumerate(ended.steps, 1):
        assert line["num_faults"] == 2
        _, lost = by_validity(ended, step)
        assert all("waited 0.3 s for colours.step of" in str(t.fault) for t in lost)


def test_a_group_left_with_one_sibling_is_dropped(bench):
    ended = bench(
        "train",
        "environment.id=parts.environments:RewardRaises",
        "environment.args.which=[0,1,2]",
        "rollout.max_dropped_share=0.9",
    )
    assert ended.code == 0
    for line in ended.steps:
        assert (line["num_faults"], line["num_dropped_groups"], line["num_tokens"]) == (6, 2, 0)
        assert "loss" not in line, "nothing was trained on"


def test_an_environment_that_always_faults_ends_the_run(bench):
    ended = bench("train", "environment.id=parts.environments:AlwaysCrashes")
    assert ended.code == 4
    assert ended.err.startswith("polyturn: error: 8 of 8 trajectories of the last 1 steps were lost")
    assert "no sandbox answers" in ended.err
    assert ended.err.count("\n") == 1
    _, lost = by_validity(ended, 1)
    assert len(lost) == 8, "the trajectories of the step that failed can be looked at"


def test_more_faults_than_the_recipe_allows_end_the_run_when_the_window_says_so(bench):
    """A quarter is lost each step and a tenth allowed over four steps: 0.8 trajectories a step, so 2 at once are too many."""
    ended = bench(
        "train",
        "environment.id=parts.environments:RewardRaises",
        "rollout.dropped_window_steps=4",
        "run.steps=4",
        "evaluation.episodes=0",
    )
    assert ended.code == 4
    # 4 x 0.8 = 3.2 may be lost in the window: 2 after the first step, 4 after the second.
    assert len(ended.steps) == 1
    assert "4 of 16 trajectories of the last 2 steps were lost" in ended.err


def test_an_evaluation_that_loses_its_episodes_ends_the_run(bench, monkeypatch):
    monkeypatch.setattr("parts.environments.Colours.setup", lambda self, task: 1 / 0)
    ended = bench("eval")
    assert ended.code == 4
    assert "4 of 4 evaluation episodes were lost" in ended.err
    assert "ZeroDivisionError" in ended.err


STUCK = """
import sys
import torch
from polyturn.cli.main import entry
from polyturn.trainer import passes

def endless(*_):
    while True:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))

assert callable(passes.policy_loss), "nothing is patched"
passes.policy_loss = endless
sys.argv[:] = ["polyturn", *sys.argv[1:]]
entry()
"""


@pytest.mark.real
def test_a_step_that_is_stuck_in_native_code_ends_with_its_exit_code(bench):
    """Its thread can't be stopped, and Python would abort the process in its attempt to: 134 instead of 3."""
    argv = ["train", str(bench.recipe), f"run.output_dir={bench.runs}", "trainer.step_deadline_s=0.3", "evaluation.episodes=0"]
    ended = run_python(STUCK, *argv)
    assert (ended.code, ended.err) == (
        3,
        "polyturn: error: waited 0.3 s for the trainer's step (trainer.step_deadline_s), which is its deadline, and it did not "
        "come\n",
    )


@pytest.mark.parametrize("episodes", [0, 4], ids=["in training", "in evaluation"])
def test_weights_that_give_nan_end_the_run_at_the_first_token(bench, colours_model, episodes):
    model = transformers.AutoModelForCausalLM.from_pretrained(colours_model, local_files_only=True)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    export_model(model, colours_model, bench.folder / "nan")
    ended = bench("train", f"model.path={bench.folder / 'nan'}", f"evaluation.episodes={episodes}")
    assert (ended.code, ended.err) == (
        4,
        "polyturn: error: a log-probability of the engine is nan or inf: the weights that it samples with are broken\n",
    )


# ── the engine's weights are not the trainer's ─────────────────────────────────────────────────────────────────────────


def spoil_pushes(monkeypatch, *names, after=0):
    """From push number `after` on, these tensors arrive with one bit changed."""
    whole, pushes = HfEngine._copy, []

    def copy(self, weights):
        whole(self, weights)
        pushes.append(len(weights))
        if len(pushes) > after:
            for name in names:
                self.named_weights()[name].view(torch.int32).view(-1)[7] ^= 1

    monkeypatch.setattr(HfEngine, "_copy", copy)


def test_a_push_that_arrives_changed_ends_the_run_and_names_the_tensors(bench, monkeypatch):
    names = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    spoil_pushes(monkeypatch, *names, after=1)
    ended = bench("train", "evaluation.episodes=0", "weight_sync.verify_every=1")
    assert ended.code == 4
    assert "after push 1 the engine differs from the trainer in 2 of " in ended.err
    assert all(name in ended.err for name in names)
    assert len(ended.steps) == 0, "nothing is trained on what such an engine samples"
