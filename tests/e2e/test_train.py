"""`polyturn train` from the command line to the folder it leaves behind."""

from __future__ import annotations

import pytest
import torch
import transformers

from parts.models import same_bits
from polyturn.config.load import load_recipe
from polyturn.loop import sync
from polyturn.rendering.words import TINY_CHAT_TEMPLATE
from polyturn.rollouts.record import read_trajectories
from polyturn.types import Turn

CHAT = [{"role": "user", "content": "say red"}]


@pytest.fixture
def trainers(monkeypatch):
    """Every trainer that a run builds."""
    built, build = [], sync.build_trainer

    def remember(*arguments, **keywords):
        built.append(build(*arguments, **keywords))
        return built[-1]

    monkeypatch.setattr(sync, "build_trainer", remember)
    return built


def test_a_run_leaves_the_folder_that_is_documented(bench, trainers):
    ended = bench("train")
    assert (ended.code, ended.err) == (0, "")
    assert ended.folder == bench.runs / "short"
    assert {path.name for path in ended.folder.iterdir()} >= {"recipe.yaml", "metrics.jsonl", "trajectories", "export"}

    lines = ended.metrics
    assert [line["step"] for line in lines] == [0, 1, 2, 2]
    assert {"eval/success", "eval/reward"} <= lines[0].keys() & lines[3].keys()
    assert [line["optimizer_step"] for line in ended.steps] == [1, 2]
    assert [line["policy_version"] for line in ended.steps] == [1, 2]
    assert [line["policy_age"] for line in ended.steps] == [0, 0]
    assert all(line["mismatch_max"] < 1e-4 for line in ended.steps)

    (trainer,) = trainers
    model = transformers.AutoModelForCausalLM.from_pretrained(ended.folder / "export", local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(ended.folder / "export", local_files_only=True)
    assert same_bits(model.state_dict(), trainer.model.state_dict())
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    trained = next(read_trajectories(ended.folder / "trajectories" / "step_000001.jsonl"))
    assert tokenizer.decode(ids) == "<|user|>say red<|end|><|assistant|>"
    assert len(ids) == len(trained.turns[0].prompt_ids)
    with torch.no_grad():
        inputs = torch.tensor([ids])
        torch.testing.assert_close(model(inputs).logits, trainer.model(inputs).logits, rtol=0, atol=1e-6)


def test_the_saved_recipe_runs_again_and_says_the_same(bench):
    first = bench("train", "evaluation.episodes=0")
    saved = first.folder / "recipe.yaml"
    again = bench.raw("train", str(saved))
    assert (again.code, again.err) == (0, "")
    assert load_recipe(again.folder / "recipe.yaml") == load_recipe(saved)
    told = [line for line in first.out.splitlines() if not line.startswith(("run", "exported", "step="))]
    assert told == [line for line in again.out.splitlines() if not line.startswith(("run", "exported", "step="))]


@pytest.mark.parametrize("verb", ["train", "warmstart"])
def test_what_is_saved_has_the_template_it_was_trained_with(bench, verb):
    template = bench.folder / "mine.jinja"
    template.write_text(TINY_CHAT_TEMPLATE.replace("'<|assistant|>'", "'<|assistant|>again '"))
    words = [f"model.chat_template={template}", "run.steps=1", "evaluation.episodes=0"]
    out = bench.folder / "warm"
    if verb == "warmstart":
        assert bench("warmstart", *words, "--out", str(out), "--steps", "1").code == 0
    else:
        out = bench("train", *words).folder / "export"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|user|>say red<|end|><|assistant|>again "


def test_a_second_run_of_a_name_gets_a_folder_of_its_own(bench):
    folders = [bench("train", "run.steps=1", "evaluation.episodes=0").folder.name for _ in range(3)]
    assert folders == ["short", "short-2", "short-3"]
    assert len(list((bench.runs / "short").glob("trajectories/*"))) == 1


def test_trajectories_on_disk_are_complete(bench):
    ended = bench("train", "rollout.group_size=3", "rollout.groups_per_step=4")
    files = sorted((ended.folder / "trajectories").iterdir())
    assert [file.name for file in files] == ["step_000001.jsonl", "step_000002.jsonl"]
    for file, line in zip(files, ended.steps, strict=True):
        found = list(read_trajectories(file))
        assert len({trajectory.id for trajectory in found}) == 12
        assert [trajectory.sibling for trajectory in found] == [0, 1, 2] * 4
        assert sum(t.total_reward for t in found) / 12 == pytest.approx(line["reward"])
        assert sum(t.num_completion_tokens for t in found) / 12 == pytest.approx(line["completion_tokens_per_trajectory"])
        for trajectory in found:
            assert_whole(trajectory.turns)
            assert set(trajectory.outcome) == {"answer"}


def assert_whole(turns: tuple[Turn, ...]) -> None:
    assert turns
    for turn in turns:
        assert len(turn.completion_ids) == len(turn.engine_logprobs) == len(turn.policy_versions) >= 1
        assert all(number <= 0 for number in turn.engine_logprobs)


def test_a_reply_cut_by_the_token_limit_is_scored_and_kept(bench):
    """A limit on the model is no fault: the trajectory counts, and the environment was told."""
    ended = bench("train", "rollout.max_turn_tokens=1", "environment.args.rounds=1", "rollout.groups_per_step=8")
    assert ended.code == 0
    for step, line in enumerate(ended.steps, 1):
        found = list(read_trajectories(ended.folder / "trajectories" / f"step_{step:06d}.jsonl"))
        cut = [t for t in found if t.turns[0].stop_reason == "length"]
        assert 0 < len(cut) <= 32
        assert all(t.valid and t.end_reason == "done" for t in cut)
        assert line["num_faults"] == line["dropped_share"] == 0
        assert line["environment/cut"] == pytest.approx(len(cut) / 32)


def test_a_trajectory_that_uses_up_its_tokens_ends_and_is_scored(bench):
    # The prompt takes 5 of 10 tokens: room for one reply of 3, and after `again` for none.
    ended = bench("train", "rollout.max_trajectory_tokens=10", "evaluation.episodes=0")
    assert ended.code == 0
    found = list(read_trajectories(ended.folder / "trajectories" / "step_000001.jsonl"))
    limited = [t for t in found if t.end_reason == "max_tokens"]
    assert limited
    assert all(t.valid and t.outcome_reward == 0 for t in limited)
    assert ended.steps[0]["truncated_share"] == pytest.approx(len(limited) / 8)


@pytest.mark.parametrize("given", [["trainer.num_iterations=2"], ["trainer.optimizer_steps_per_batch=2"]])
def test_several_optimizer_steps_a_batch(bench, given):
    ended = bench("train", *given, "rollout.groups_per_step=6", "trainer.learning_rate=0.01")
    assert ended.code == 0
    assert ended.steps[-1]["optimizer_step"] == 4
    assert all(line["ratio"] != 1 for line in ended.steps)
    assert all(line["mismatch_max"] < 1e-4 for line in ended.steps), "old log-probabilities are from before the first step"


def test_a_kl_term_in_a_run(bench):
    ended = bench("train", "algorithm.loss_options.beta=0.1", "run.steps=3", "rollout.groups_per_step=4")
    assert ended.code == 0
    first, *later = ended.steps
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert all(line["kl"] > 1e-7 for line in later), "the reference stays where it was"
