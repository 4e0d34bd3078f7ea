"""Tasks from environments and files, and what is said about wrong ones."""

from __future__ import annotations

import json

import pytest

from parts.environments import Colours, NoTasks, TasksRaise
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.loop.tasks import authors_code, held_out_tasks, load_tasks, tasks_from_file
from unit.loop.makers import make_recipe


def rows(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_rows_become_tasks_named_by_file_and_line(tmp_path):
    path = rows(tmp_path / "rows.jsonl", {"answer": "red"}, "\n", {"answer": "Blue"})
    tasks = tasks_from_file(path, Colours())
    assert tasks.size == 2
    assert [tasks[i].id for i in range(2)] == [f"{path}:1", f"{path}:3"]
    assert [tasks[i].answer for i in range(2)] == ["red", "blue"]


def test_every_bad_row_is_named_in_one_go(tmp_path):
    path = rows(tmp_path / "rows.jsonl", {"answer": "red"}, {"answer": ""}, {"answer": 5}, {"answer": "red"}, {})
    with pytest.raises(DataError) as caught:
        tasks_from_file(path, Colours())
    assert str(caught.value).splitlines() == [
        f"{path}:2: field 'answer' is missing or empty; a colour is needed",
        f"{path}:3: colours.task_from_row raised AttributeError: 'int' object has no attribute 'lower'",
        f"{path}:5: field 'answer' is missing or empty; a colour is needed",
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no rows"),
        ("\n\n", "holds no rows"),
        ("red\n", r"rows\.jsonl:1: not valid JSON"),
        ("[1]\n", r"rows\.jsonl:1: this element is a number; an object is needed"),
        ('{"answer": "red"}\n{"answer": \n', r"rows\.jsonl:2: not valid JSON"),
    ],
)
def test_files_that_hold_no_rows(tmp_path, content, says):
    with pytest.raises(DataError, match=says):
        tasks_from_file(rows(tmp_path / "rows.jsonl", content), Colours())


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        tasks_from_file(str(tmp_path / "gone.jsonl"), Colours())


def test_an_environment_that_reads_no_rows_says_so(tmp_path):
    class Deaf(Colours):
        task_from_row = Colours.__mro__[1].task_from_row  # the one that Environment has

    with pytest.raises(DataError, match=r"environment colours makes its own tasks and reads no data file; remove data.path"):
        tasks_from_file(rows(tmp_path / "rows.jsonl", {"answer": "red"}), Deaf())


def test_splits_of_a_recipe(tmp_path):
    path = rows(tmp_path / "rows.jsonl", {"answer": "red"}, {"answer": "blue"})
    other = rows(tmp_path / "other.jsonl", {"answer": "green"})
    environment = Colours(held_out=5)
    own = make_recipe()
    assert load_tasks(own, environment, "train").size is None
    assert len(held_out_tasks(own, environment)) == 5, "asked for 128, there are no more"
    assert len(held_out_tasks(own, environment, 3)) == 3
    filed = make_recipe(data={"path": path}, rollout={"groups_per_step": 1})
    assert load_tasks(filed, environment, "train").size == 2
    assert held_out_tasks(filed, environment) == [], "the environment's own would be other problems"
    both = make_recipe(data={"path": path, "eval_path": other}, rollout={"groups_per_step": 1})
    assert [task.answer for task in held_out_tasks(both, environment)] == ["green"]


def test_the_seed_of_the_run_makes_the_training_tasks():
    one, two = (load_tasks(make_recipe(run={"steps": 2, "seed": seed}), Colours(), "train") for seed in (1, 2))
    assert [one[i].answer for i in range(20)] != [two[i].answer for i in range(20)]
    assert one[3] == load_tasks(make_recipe(run={"steps": 2, "seed": 1}), Colours(), "train")[3]


@pytest.mark.parametrize("call", [lambda e: load_tasks(make_recipe(), e, "train"), lambda e: held_out_tasks(make_recipe(), e)])
def test_what_an_authors_code_raises_is_a_sentence(call):
    with pytest.raises(EnvironmentSetupError, match=r"colours\.tasks\('(train|eval)', 0\) raised KeyError: 'split'"):
        call(TasksRaise())


def test_a_held_out_task_that_can_not_be_made():
    class Torn(Colours):
        def tasks(self, split, seed):
            source = super().tasks(split, seed)
            return type("Torn", (), {"size": 3, "__getitem__": lambda self, index: source[99]})()

    with pytest.raises(EnvironmentSetupError, match="a held-out task of colours raised IndexError"):
        held_out_tasks(make_recipe(), Torn())


def test_authors_code_leaves_our_own_sentences_alone():
    with pytest.raises(DataError, match=r"^row 3$"), authors_code("tasks"):
        raise DataError("row 3")
    with pytest.raises(KeyboardInterrupt), authors_code("tasks"):
        raise KeyboardInterrupt


def test_an_environment_without_tasks():
    assert load_tasks(make_recipe(), NoTasks(), "train").size == 0
    assert held_out_tasks(make_recipe(), NoTasks()) == []
