"""`rollout` records what the first training step plays; `replay` trains on it, the same to the bit each time."""

from __future__ import annotations

import json
import re

import pytest
import transformers

from parts.models import same_bits, snapshot
from parts.runs import read_jsonl, run_python

EXACT = "engine.deterministic=true"
"""Whoever shares a batch makes a difference in the last digit."""


@pytest.fixture
def recorded(bench):
    """A file of two groups of four."""
    path = bench.folder / "recorded.jsonl"
    ended = bench("rollout", "--out", str(path), EXACT)
    assert (ended.code, ended.err) == (0, "")
    return path


REPLAY = "import sys; from polyturn.cli.main import main; sys.exit(main(['replay', *sys.argv[1:]]))"


def replay(bench, path, *words):
    """`polyturn replay recipe.yaml PATH WORDS`."""
    return bench.raw("replay", str(bench.recipe), path, *words)


def numbers(out: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^(\w+)=(\S+)$", out))


def rewrite(path, change):
    """Change the rows of a file: `change` gets each with its index, in place."""
    rows = read_jsonl(path)
    for index, row in enumerate(rows):
        change(index, row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ── rollout ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rollout_records_groups_and_says_what_they_came_to(bench):
    path = bench.folder / "deep" / "recorded.jsonl"
    ended = bench("rollout", "--tasks", "3", "--out", str(path))
    assert ended.code == 0
    rows = read_jsonl(path)
    tasks = [row["task"]["id"] for row in rows]
    assert tasks == sorted(tasks, key=tasks.index), "a group's rows stand together"
    assert [row["sibling"] for row in rows] == [0, 1, 2, 3] * 3
    assert len(set(tasks)) == 3
    lines = ended.out.splitlines()
    assert lines[-1] == f"trajectories: {path}"
    assert "rollout: 12 of 12 trajectories, 0 faults" in lines
    assert len([line for line in lines if line.startswith("rollout: ")]) == 10
    assert "sampled: 3 tasks x 4; mean [95 % interval]" in lines
    mean = sum(turn["reward"] for row in rows for turn in row["turns"]) / 12 + sum(row["outcome_reward"] for row in rows) / 12
    assert f"  {'reward':<28} {mean:.3f} [" in ended.out


def test_rollout_plays_what_the_first_training_step_plays(bench, recorded):
    trained = bench("train", "run.steps=1", "evaluation.episodes=0", EXACT)
    step = read_jsonl(trained.folder / "trajectories" / "step_000001.jsonl")
    for row in step:
        for turn in row["turns"]:
            turn["advantage"] = None
    assert read_jsonl(recorded) == step


def test_rollout_of_another_model_does_not_need_the_recipes(bench, recorded, colours_model):
    bench.recipe.write_text(bench.recipe.read_text().replace(str(colours_model), "gone"))
    again = bench.folder / "again.jsonl"
    assert bench("rollout", "--model", str(colours_model), "--out", str(again), EXACT).code == 0
    assert again.read_bytes() == recorded.read_bytes()


def test_rollout_with_too_many_faults_keeps_the_file_and_fails(bench):
    path = bench.folder / "recorded.jsonl"
    ended = bench("rollout", "environment.id=parts.environments:AlwaysCrashes", "environment.args={}", "--out", str(path))
    assert ended.code == 4
    assert re.fullmatch(r"polyturn: error: \d+ of 8 .* were lost, more than rollout.max_dropped_share=0.1 .*\n", ended.err)
    assert len(read_jsonl(path)) == 8


# ── replay ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_replay_is_equal_to_the_bit_each_time(bench, recorded):
    first, again = (replay(bench, str(recorded), "--out", str(bench.folder / name)) for name in ("one", "two"))
    assert (first.code, first.err) == (0, "")
    assert first.out.splitlines()[0].startswith("8 trajectories in 2 groups; left out: 0 faults, 0 broken samples")
    assert numbers(first.out) == numbers(again.out)
    shown = numbers(first.out)
    assert {"loss", "grad_norm", "mismatch", "entropy"} <= shown.keys()
    assert all(repr(float(value)) == value for value in shown.values()), "every digit is there"
    assert float(shown["grad_norm"]) > 0
    one, two = (snapshot(transformers.AutoModelForCausalLM.from_pretrained(bench.folder / name)) for name in ("one", "two"))
    assert same_bits(one, two)
    assert first.out.splitlines()[-1] == f"exported model: {bench.folder / 'one'}"


@pytest.mark.real
def test_replay_in_a_process_of_its_own_gives_the_same_numbers(bench, recorded):
    assert numbers(run_python(REPLAY, str(bench.recipe), str(recorded)).out) == numbers(replay(bench, str(recorded)).out)


def test_replay_of_a_step_is_that_step(bench, recorded, colours_model):
    trained = bench("train", "run.steps=1", "evaluation.episodes=0", EXACT)
    replayed = replay(bench, str(recorded), "run.steps=1", "--out", str(bench.folder / "replayed"))
    shown = {name: float(value) for name, value in numbers(replayed.out).items()}
    (step,) = trained.steps
    assert shown == {name: step[name] for name in shown}
    models = [trained.folder / "export", bench.folder / "replayed", colours_model]
    step_, replay_, before = (snapshot(transformers.AutoModelForCausalLM.from_pretrained(folder)) for folder in models)
    assert same_bits(step_, replay_)
    assert not same_bits(replay_, before)


def test_the_order_of_the_lines_does_not_matter_within_a_task(bench, recorded):
    before = numbers(replay(bench, str(recorded)).out)
    lines = recorded.read_text().splitlines(keepends=True)
    recorded.write_text("".join(lines[3::-1] + lines[4:]))
    assert numbers(replay(bench, str(recorded)).out) == before


def test_credit_is_given_anew_from_the_rewards_in_the_file(bench, recorded):
    before = numbers(replay(bench, str(recorded)).out)
    rewrite(recorded, lambda index, row: row.update(outcome_reward=float(index % 2)))
    after = numbers(replay(bench, str(recorded)).out)
    assert before["grad_norm"] != after["grad_norm"]
    other = numbers(replay(bench, str(recorded), "algorithm.advantage=rloo").out)
    assert other["grad_norm"] != after["grad_norm"]


def test_trajectories_of_a_later_step_are_not_old(bench):
    trained = bench("train", "run.steps=3", "evaluation.episodes=0")
    path = trained.folder / "trajectories" / "step_000003.jsonl"
    assert {version for row in read_jsonl(path) for turn in row["turns"] for version in turn["policy_versions"]} == {2}
    assert numbers(replay(bench, str(path)).out)["policy_age"] == "0.0"


def test_a_fault_is_left_out_and_counted(bench, recorded):
    rewrite(recorded, lambda index, row: row.update(fault="the pool is gone" if index == 2 else None))
    ended = replay(bench, str(recorded))
    assert ended.code == 0
    assert "left out: 1 faults" in ended.out


def edit(**changes):
    return lambda index, row: row.update(changes) if index == 5 else None


def edit_turn(**changes):
    return lambda index, row: row["turns"][0].update(changes) if index == 5 else None


def edit_task(**changes):
    return lambda index, row: row["task"].update(changes) if index == 5 else None


def all_alike(index, row):
    row.update(outcome_reward=1.0, turns=row["turns"][:1])
    row["turns"][0].update(reward=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit(format=9), "{path}:6: trajectory format 9 is not 1"),
        (edit(turns=None), "{path}:6: not a recorded trajectory"),
        (edit(sibling=0), "{path}:6: sibling 0 of task train/0/1 is there twice"),
        (edit(outcome_reward=[]), "{path}:6: a reward of the outcome is no finite number"),
        (edit_task(environment="lookup"), "{path}:6: a trajectory of environment 'lookup', and the recipe's is 'colours'"),
        (edit_task(answer="pink"), "{path}:6: task train/0/1 is not the one of the same id above"),
        (edit_turn(prompt_ids=[10**6]), "{path}:6: token id 1000000 is outside the model's "),
        (edit_turn(prompt_ids=[-1]), "{path}:6: in turn 0 a token id or policy version is no whole number"),
        (edit_turn(prompt_ids="ab"), "{path}:6: in turn 0 a token id or policy version is no whole number"),
        (edit_turn(engine_logprobs=[-1.0] * 9), "log-probabilities and"),
        (edit_turn(reward="much"), "{path}:6: turn 0 has the reward 'much', which is no finite number"),
        (edit_turn(continues=True), "{path}:6: the first turn says that it continues another"),
        (all_alike, "{path}: nothing to train in 2 groups: 2 with all advantages 0"),
    ],
)
def test_what_can_not_be_replayed_is_said_with_its_line(bench, recorded, change, said):
    rewrite(recorded, change)
    ended = replay(bench, str(recorded), "--out", str(bench.folder / "new"))
    assert ended.code == 2
    assert ended.err.startswith("polyturn: error: ")
    assert ended.err.count("\n") == 1
    assert said.format(path=recorded) in ended.err
    assert not (bench.folder / "new").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout", "--out", "OLD"], "exists already; name a new file"),
        (["rollout", "--out", "UNDER"], "can't be made (Not a directory); name another file"),
        (["rollout", "--out", "NEW", "--tasks", "0"], "--tasks=0; give 1 or more"),
        (["rollout", "--out", "NEW", "--tasks", "9", "data.path=ROWS"], "--tasks=9 but there are only 3 training tasks"),
        (["rollout", "--out", "NEW", "--model", "nowhere"], "model.path=nowhere does not exist"),
        (["replay", "OLD", "--out", "OLD"], "exists already; name a new folder"),
        (["replay", "OLD", "--out", "UNDER"], "can't be made (Not a directory); name another folder"),
        (["replay", "NEW"], "does not exist"),
        (["replay", "EMPTY"], "holds no trajectories"),
    ],
)
def test_mistakes_of_the_command_line(bench, words, said):
    places = {name: bench.folder / name.lower() for name in ("OLD", "NEW", "EMPTY", "ROWS")}
    places["UNDER"] = places["OLD"] / "under"
    places["OLD"].write_text("{}\n")
    places["EMPTY"].write_text("")
    places["ROWS"].write_text('{"answer": "red"}\n' * 3)
    for name, place in places.items():
        words = [word if word == f"--{name}" else re.sub(rf"\b{name}\b", str(place), word) for word in words]
    ended = replay(bench, *words[1:]) if words[0] == "replay" else bench(*words)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert said in ended.err
    assert not places["NEW"].exists()
    assert places["OLD"].read_text() == "{}\n"
