"""Environments of a recipe with its rewards, mixes, and the order in which tasks are taken."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from polyturn.config.schema import Recipe
from polyturn.data.mix import MixedStream, MixedTasks
from polyturn.data.stream import TaskStream
from polyturn.environments.mixed import Mixed
from polyturn.environments.resources import Resources
from polyturn.environments.rewarded import Rewarded
from polyturn.errors import ConfigError, DataError, EnvironmentSetupError
from polyturn.loop.check import check
from polyturn.loop.parts import component_weights, recipe_environment
from polyturn.loop.tasks import held_out_tasks, load_tasks, open_stream, tasks_from_file

COLOURS = "parts.environments:Colours"
EXACT = {"path": "exact_match"}


def recipe(environment=None, **sections):
    return Recipe.model_validate(
        {"model": {"path": "builtin:tiny"}, "environment": environment or {"id": COLOURS}, "run": {"steps": 2}} | sections
    )


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def qa(n, **more):
    return {"question": f"What is {n} + {n}?", "answer": str(2 * n), **more}


def loaded(made, split="train"):
    environment = recipe_environment(made)
    return load_tasks(made, environment, split)


# ── rows ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_in_a_built_in_format(tmp_path):
    path = write(tmp_path / "a.jsonl", qa(1), qa(2, difficulty="easy"))
    tasks = loaded(recipe({"id": "chat", "rewards": [EXACT]}, data={"path": path}))
    assert [tasks[index].id for index in range(2)] == [f"{path}:1", f"{path}:2"]
    assert (tasks[1].answer, tasks[1].info) == ("4", {"difficulty": "easy"})


def test_every_bad_row_is_named_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "x", "answer": 5}\nred\n\n{"question": "x", "answer": "y"}\n{"question": "x"}\n')
    with pytest.raises(DataError) as caught:
        loaded(recipe({"id": "chat", "rewards": [EXACT]}, data={"path": str(path)}))
    assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == [f"{path}:{n}" for n in (1, 2, 5)]
    rows = write(tmp_path / "b.jsonl", {"answer": "red"}, {"colour": "blue"}, {"answer": 5})
    with pytest.raises(DataError) as caught:
        loaded(recipe(data={"path": rows}))
    assert str(caught.value).splitlines() == [
        f"{rows}:2: field 'answer' is missing or empty; a colour is needed",
        f"{rows}:3: colours.task_from_row raised AttributeError: 'int' object has no attribute 'lower'",
    ]


def test_rows_in_fields_of_the_environments_own_keep_their_difficulty(tmp_path):
    path = write(tmp_path / "a.jsonl", {"answer": "red", "difficulty": "hard"}, {"answer": "blue", "difficulty": None})
    tasks = loaded(recipe(data={"path": path}))
    assert [tasks[index].info for index in range(2)] == [{"difficulty": "hard"}, {}]


def test_a_transform_comes_first(tmp_path, monkeypatch):
    (tmp_path / "my_tasks.py").write_text('def f(row):\n    return {"answer": row["c"]} if row["c"] != "green" else None\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    path = write(tmp_path / "a.jsonl", {"c": "red"}, {"c": "green"}, {"c": "blue"})
    tasks = loaded(recipe(data={"path": path, "transform": "my_tasks.f"}))
    assert [tasks[index].answer for index in range(tasks.size)] == ["red", "blue"]
    assert tasks[1].id == f"{path}:3"


def test_files_of_any_container(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("answer\nred\nblue\n")
    environment = recipe_environment(recipe())
    assert tasks_from_file(str(path), environment).size == 2


# ── what scores ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rewards_are_put_around_the_environment():
    made = recipe(
        {"id": COLOURS, "rewards": [EXACT, {"path": "length_penalty", "args": {"free": 1, "limit": 9}, "weight": 0.1}]}
    )
    environment = recipe_environment(made)
    assert isinstance(environment, Rewarded)
    assert environment.name == "colours"
    assert component_weights(made) == {"exact_match": 1.0, "length_penalty": 0.1}
    weighed = recipe({"id": COLOURS, "rewards": [EXACT], "reward_weights": {"exact_match": 2.0, "said": 0.5}})
    assert component_weights(weighed) == {"exact_match": 2.0, "said": 0.5}
    of_turns = recipe({"id": COLOURS, "rewards": [EXACT | {"per": "turn", "weight": 3.0}]})
    assert component_weights(of_turns) == {}


def test_an_environment_that_scores_nothing_needs_a_reward():
    with pytest.raises(EnvironmentSetupError, match=r"chat scores nothing itself; list a reward under environment\.rewards"):
        recipe_environment(recipe({"id": "chat"}))
    with pytest.raises(EnvironmentSetupError, match="scores nothing itself"):
        recipe_environment(recipe({"id": "chat", "rewards": [EXACT | {"per": "turn"}]}))
    assert recipe_environment(recipe({"id": "chat", "args": {"exact": True}})).scores


def test_a_reward_that_runs_code_gets_the_sandbox(tmp_path):
    made = recipe(
        {"id": "chat", "rewards": [{"path": "tests_passed"}]},
        data={"path": write(tmp_path / "a.jsonl", qa(1), qa(2))},
        rollout={"groups_per_step": 2},
    )
    with pytest.raises(EnvironmentSetupError, match="there is no sandbox to run it in"):
        recipe_environment(made)
    runner = object()
    environment = recipe_environment(made, Resources(runner=runner))
    assert environment._of_trajectories[0].function.runner is runner


# ── mixes and curricula ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def mixed(tmp_path):
    path = write(tmp_path / "a.jsonl", *[qa(n) for n in range(10)])
    held = write(tmp_path / "b.jsonl", *[qa(n) for n in range(20, 23)])
    entry = {
        "environment": "chat",
        "name": "sums",
        "weight": 3.0,
        "path": path,
        "eval_path": held,
        "rewards": [EXACT | {"name": "right", "weight": 0.5}],
    }
    return lambda **more: recipe(data={"mix": [entry | more]}, evaluation={"episodes": 8}, rollout={"groups_per_step": 8})


def test_a_mix_of_environments(mixed):
    checked = check_parts(mixed())
    environment, tasks = checked
    assert isinstance(environment, Mixed)
    assert list(environment.parts) == ["colours", "sums"]
    assert isinstance(tasks, MixedTasks)
    assert tasks.size is None, "colours have no end"
    stream = open_stream(mixed(), tasks)
    assert isinstance(stream, MixedStream)
    taken = stream.take(400)
    assert abs(Counter(task.environment for task in taken)["sums"] - 300) <= 4
    assert len({task.id for task in taken}) == 400
    assert open_stream(mixed(), tasks, cursor=100).take(5) == taken[100:105]
    assert component_weights(mixed()) == {"right": 0.5}


def check_parts(made):
    environment = recipe_environment(made)
    return environment, load_tasks(made, environment, "train")


def test_held_out_tasks_of_a_mix_are_shared_by_weight(mixed):
    environment = recipe_environment(mixed())
    tasks = held_out_tasks(mixed(), environment)
    assert Counter(task.environment for task in tasks) == {"colours": 2, "sums": 3}, "sums would give 6 and has 3"
    assert len({task.id for task in tasks}) == len(tasks)
    only = held_out_tasks(mixed(eval_path=None), environment)
    assert Counter(task.environment for task in only) == {"colours": 8}


def test_mixes_that_can_not_be(mixed):
    with pytest.raises(EnvironmentSetupError, match=r"two parts of data\.mix are called 'colours'"):
        recipe_environment(mixed(name="colours"))
    clash = mixed(rewards=[EXACT, EXACT | {"name": "other"}])
    main = clash.model_copy(update={"environment": recipe({"id": COLOURS, "rewards": [EXACT | {"weight": 2.0}]}).environment})
    with pytest.raises(EnvironmentSetupError, match="weigh the reward exact_match 2 and 1; give one another name"):
        component_weights(main)
    with pytest.raises(EnvironmentSetupError, match="chat scores nothing itself"):
        recipe_environment(mixed(rewards=[]))


def test_a_curriculum_is_refused_before_anything_loads(tmp_path):
    path = write(tmp_path / "a.jsonl", *[qa(n, difficulty=9 - n) for n in range(8)])
    made = recipe(
        {"id": "chat", "rewards": [EXACT]},
        data={"path": path, "curriculum": "easy_first"},
        rollout={"groups_per_step": 8},
    )
    stream = open_stream(made, loaded(made))
    assert isinstance(stream, TaskStream)
    assert [task.info["difficulty"] for task in stream.take(8)] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    with pytest.raises(DataError, match="these have no end"):
        check(recipe(data={"curriculum": "easy_first"}))
    write(tmp_path / "a.jsonl", *[qa(n) for n in range(8)])
    with pytest.raises(DataError, match="no difficulty that can be ordered"):
        check(made)


def test_check_refuses_a_reward_that_can_not_be_built():
    with pytest.raises(EnvironmentSetupError, match="did you mean exact_match"):
        check(recipe({"id": COLOURS, "rewards": [{"path": "exact_mach"}]}))
    with pytest.raises(ConfigError, match="no module named nowhere"):
        check(recipe({"id": COLOURS, "rewards": [{"path": "nowhere:f"}]}))
