"""`reasoning_gym` with the real package: all its data sets, and what hostile answers do. Needs the extra `reasoning-gym`."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import numpy as np
import pytest

from parts.chance import chance
from polyturn.environments.adapters.gym_client import GymProcess
from polyturn.environments.adapters.gym_worker import REFUSED
from polyturn.environments.adapters.reasoning_gym import ReasoningGym
from polyturn.environments.base import Reply
from polyturn.environments.contract import check_contract
from polyturn.errors import DataError, EnvironmentSetupError

pytestmark = pytest.mark.real
NO_GOLD = {"boxnet", "rush_hour"}
"""Data sets whose answers the package does not know itself."""
PARTS = 8
DOCS = Path(__file__).parents[4] / "docs" / "reasoning_gym.md"


@pytest.fixture
def gyms():
    made = []

    def make(name, **arguments):
        made.append(ReasoningGym(name=name, **arguments))
        return made[-1]

    yield make
    for environment in made:
        environment._maker.close()
        environment._scorer.close()


def all_names():
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


@pytest.mark.parametrize("part", sorted(chance("data sets").sample(range(PARTS), 3)))
def test_every_data_set_of_the_package(part):
    """Built, the same again from a new process, gold of full marks, and nonsense below them: three eighths a commit."""
    problems = {}
    for name in all_names()[part::PARTS]:
        if name in REFUSED:
            continue
        process = GymProcess(name, {}, cpu_s=10.0)
        try:
            made = [process.ask("make", seed, index) for seed, index in ((1 << 24, 0), (1 << 24, 5), (0, 3))]
            process.close()
            found = [
                "not repeated" if process.ask("make", 1 << 24, 5) != made[1] else None,
                "no gold" if any(task["gold"] is None for task in made) else None,
            ]
            for text in ("banana", "0", "[]", "{}", "A"):
                said = process.ask_or_none("score", 1 << 24, 5, text)
                wrong = text not in (made[1]["gold"], made[1]["answer"])
                found.append(f"{text!r}: {said}" if wrong and (said is None or said.get("score", 0.0) >= 1.0) else None)
            problems[name] = [problem for problem in found if problem]
        finally:
            process.close()
    assert {name: found for name, found in problems.items() if found} == {
        name: ["no gold"] for name in problems if name in NO_GOLD
    }


def test_the_docs_name_every_data_set():
    text = DOCS.read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+)`", text)) >= set(all_names())
    assert f"{len(all_names())} data sets" in text


@pytest.mark.parametrize("name", ["chain_sum", "list_functions", "pool_matrix", "graph_color", "knights_knaves", "word_ladder"])
async def test_the_contract(name, gyms):
    environment = gyms(name)
    await environment.start()
    report = await check_contract(environment)
    await environment.stop()
    assert report.failed == []


def test_the_generators_of_this_process_are_left_alone(gyms):
    random.seed(7)
    np.random.seed(7)  # it is the old generator that must not be touched
    before = (random.getstate(), np.random.get_state()[1].tobytes())
    for name in ("list_functions", "pool_matrix"):
        source = gyms(name).tasks("train", 3)
        assert source[0] == source[0]
        assert source[0] != source[1]
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


def test_tasks_differ_by_seed_and_split_and_go_on_past_a_chunk(gyms):
    environment = gyms("chain_sum", num_held_out=2000)
    assert environment.tasks("train", 0).size is None
    assert environment.tasks("eval", 0).size == 2000
    texts = {
        environment.tasks(split, seed)[index].messages[-1].content
        for split, seed, index in (("train", 0, 0), ("train", 0, 1024), ("train", 1, 0), ("eval", 0, 0), ("eval", 0, 1500))
    }
    assert len(texts) == 5
    assert environment.tasks("eval", 0)[1500] == environment.tasks("eval", 9)[1500]


async def scored(environment, task, reply):
    state = await environment.setup(task)
    step = await environment.step(state, Reply(text=reply))
    assert step.done
    return dict(step.counts), await environment.rewards(state)


async def test_replies_and_their_scores(gyms):
    environment = gyms("countdown")
    task = environment.tasks("train", 0)[0]
    gold = environment.gold(task)[0]
    assert await scored(environment, task, f"<think><answer>1</answer></think> {gold}") == ({}, {"answer": 1.0})
    assert await scored(environment, task, "42") == ({"no_answer": 1}, {"answer": 0.0})
    assert await scored(environment, task, "<answer> </answer>") == ({"no_answer": 1}, {"answer": 0.0})
    counts, outcome = await scored(environment, task, "<answer>1 + 1</answer>")
    assert counts == {}
    assert 0 < outcome["answer"] < 1
    whole = gyms("countdown", partial=False)
    assert await scored(whole, task, "<answer>1 + 1</answer>") == ({}, {"answer": 0.0})


async def test_hostile_answers_cost_themselves_only(gyms, tmp_path):
    environment = gyms("countdown", score_cpu_s=1.0)
    task = environment.tasks("train", 0)[0]
    code = f"__import__('pathlib').Path('{tmp_path}/owned').touch()"
    assert await scored(environment, task, f"<answer>{code}</answer>") == ({"unreadable_answer": 1}, {"answer": 0.0})
    assert await scored(environment, task, "<answer>9**9**9**9</answer>") == ({"scorer_died": 1}, {"answer": 0.0})
    assert await scored(environment, task, environment.gold(task)[0]) == ({}, {"answer": 1.0}), "a new process goes on"
    assert not (tmp_path / "owned").exists()
    cube = gyms("rubiks_cube")
    task = cube.tasks("train", 0)[0]
    _, outcome = await scored(cube, task, "<answer>U9999999999999</answer>")
    assert outcome["answer"] < 0.5


async def test_no_process_is_left_behind(gyms):
    environment = gyms("chain_sum")
    await environment.start()
    pids = [environment._maker.pid, environment._scorer.pid]
    await environment.stop()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert environment.tasks("train", 0)[0].answer


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("chain_sums", {}, "has no data set 'chain_sums'; did you mean chain_sum"),
        ("composite", {}, "mix those in data.mix"),
        ("game_of_life_halting", {}, "full marks to every answer"),
        ("coin_flip", {}, "full marks to the answer 0"),
        ("chain_sum", {"min_term": 3}, "config.min_term is no setting of chain_sum; did you mean min_terms"),
        ("chain_sum", {"seed": 3}, "config.seed is no setting"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "refuses its configuration: AssertionError"),
        ("chain_sum", {"min_terms": "many"}, "refuses its configuration"),
    ],
)
def test_data_sets_that_are_refused(name, config, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        ReasoningGym(name=name, config=config)


def test_settings_reach_the_data_set(gyms):
    task = gyms("chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}).tasks("train", 0)[0]
    assert re.search(r": \d [+-] \d =", task.messages[-1].content)
    environment = gyms("rush_hour")
    task = environment.tasks("train", 0)[0]
    with pytest.raises(DataError, match="gives no answer"):
        environment.gold(task)
