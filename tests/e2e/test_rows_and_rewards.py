"""A CSV file and a list of rewards, trained without framework code; a mix of it with another environment."""

from __future__ import annotations

from collections import Counter

import pytest

from polyturn.rollouts.record import read_trajectories

ROWS = """\
question,answer,difficulty,follow_up
say red,red,hard,
say blue,blue,easy,again
say green,green,medium,
say red again,red,expert,
"""
REWARDS = "environment.rewards=[{path: exact_match}, {path: length_penalty, args: {free: 0, limit: 4}, weight: 0.5}]"


def raises(trajectory, task):
    raise ValueError("bad json")


@pytest.fixture
def chat(bench):
    """Words for the command line: rows of a file, scored by two rewards."""
    (bench.folder / "rows.csv").write_text(ROWS)
    (bench.folder / "held.csv").write_text("question,answer\nsay red,red\nsay blue,blue\n")
    return [
        "environment.id=chat",
        REWARDS,
        f"data.path={bench.folder}/rows.csv",
        f"data.eval_path={bench.folder}/held.csv",
        f"data.cache_dir={bench.folder}/cache",
        "data.curriculum=easy_first",
    ]


def played(ended):
    return [t for path in sorted((ended.folder / "trajectories").iterdir()) for t in read_trajectories(path)]


def test_a_file_and_a_list_of_rewards_train(bench, chat):
    ended = bench("train", *chat)
    assert (ended.code, ended.err) == (0, "")
    assert {"outcome/exact_match", "outcome/length_penalty"} <= ended.steps[0].keys()
    assert {"eval/reward", "eval/success"} <= ended.metrics[0].keys()
    trajectories = played(ended)
    asked = list(dict.fromkeys(trajectory.task.messages[-1].content for trajectory in trajectories))
    assert set(asked[:2]) == {"say blue", "say green"}, "the two easiest rows come first"
    for trajectory in trajectories:
        exact, penalty = (trajectory.outcome[name] for name in ("exact_match", "length_penalty"))
        assert trajectory.outcome_reward == pytest.approx(exact + 0.5 * penalty)
        assert trajectory.success == (exact == 1)
        assert penalty == -min(1, sum(len(turn.completion_ids) for turn in trajectory.turns) / 4)
        assert len(trajectory.turns) == (2 if trajectory.task.messages[-1].content == "say blue" else 1)
    assert list((bench.folder / "cache").glob("*.npz"))


def test_the_saved_recipe_of_such_a_run_is_checked_again(bench, chat):
    ended = bench("train", *chat, "run.steps=1", "evaluation.episodes=0")
    assert bench.raw("train", str(ended.folder / "recipe.yaml"), "--dry-run").code == 0
    checked = bench.raw("data", "check", f"{bench.folder}/rows.csv", "--recipe", str(ended.folder / "recipe.yaml"))
    assert checked.code == 0
    assert "from the cache" in checked.out


def test_two_environments_in_one_run(bench, chat):
    entry = f"{{environment: chat, name: rows, weight: 1, path: {bench.folder}/rows.csv, rewards: [{{path: exact_match}}]}}"
    ended = bench("train", f"data.mix=[{entry}]", "rollout.groups_per_step=4")
    assert (ended.code, ended.err) == (0, "")
    trajectories = played(ended)
    counts = Counter(trajectory.task.environment for trajectory in trajectories)
    assert counts == {"colours": 16, "rows": 16}, "two steps of four groups of four"
    outcomes = {trajectory.task.environment: set(trajectory.outcome) for trajectory in trajectories}
    assert outcomes["rows"] == {"exact_match"}
    assert outcomes["colours"].isdisjoint(outcomes["rows"])
    assert all(trajectory.fault is None for trajectory in trajectories)


def test_a_reward_that_raises_ends_the_run_with_its_reason(bench, chat):
    broken = "environment.rewards=[{path: 'e2e.test_rows_and_rewards:raises', name: mine}]"
    ended = bench("train", *chat, broken, "evaluation.episodes=0")
    assert ended.code == 4
    assert "the last reason: " in ended.err
    assert "the reward mine raised ValueError: bad json" in ended.err
    assert all(trajectory.outcome_reward is None for trajectory in played_so_far(bench))


def played_so_far(bench):
    return [t for path in sorted(bench.runs.glob("*/trajectories/*")) for t in read_trajectories(path)]


def test_a_bad_row_ends_the_command_before_anything_loads(bench, chat):
    (bench.folder / "rows.csv").write_text(ROWS + "say red,,easy,\nsay,red\n")
    ended = bench("train", *chat)
    assert ended.code == 2
    assert ended.err.splitlines() == [
        f"polyturn: error: {bench.folder}/rows.csv:6: 'answer' is an empty string",
        f"polyturn: error: {bench.folder}/rows.csv:7: 2 cells, and the first line names 4; quote a cell with commas",
    ]
    assert not bench.runs.exists()


@pytest.mark.parametrize("mixed", [False, True])
def test_rollout_takes_the_tasks_of_the_first_step_in_their_order(bench, chat, mixed):
    entry = f"{{environment: chat, name: rows, weight: 1, path: {bench.folder}/rows.csv, rewards: [{{path: exact_match}}]}}"
    # Without a mix the rows come easiest first; with one, rows and colours take turns.
    words = [f"data.mix=[{entry}]", "rollout.groups_per_step=4"] if mixed else chat
    path = bench.folder / "recorded.jsonl"
    words = [*words, "engine.deterministic=true"]  # whoever shares a batch makes a difference in the last digit
    assert bench("rollout", *words, "--out", str(path)).code == 0
    trained = bench("train", *words, "run.steps=1", "evaluation.episodes=0")
    recorded = list(read_trajectories(path))
    assert recorded == played(trained)
    assert len({trajectory.task.environment for trajectory in recorded}) == (2 if mixed else 1)
