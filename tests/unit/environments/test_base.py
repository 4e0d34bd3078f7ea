"""What an environment gets for free, and what it may return."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import random
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.environments.base import Environment, StepResult, TaskList, info_of
from polyturn.environments.calls import call, checked_outcome, checked_step
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.types import Message, Task


class Smallest(Environment):
    name = "smallest"

    def tasks(self, split, seed):
        return TaskList([Task(id="a", environment="smallest", messages=())])

    async def setup(self, task):
        return object()

    async def step(self, state, reply):
        return StepResult(done=True)

    async def rewards(self, state):
        return {}

    def gold(self, task):
        return ["one", "two"]


async def test_what_comes_for_free():
    environment = Smallest()
    task = environment.tasks("train", 0)[0]
    assert environment.demonstrations(task, random.Random(0)) == ["one", "two"]
    assert await environment.close(object()) is None
    with pytest.raises(EnvironmentSetupError, match="smallest has no closed vocabulary"):
        environment.vocabulary()
    with pytest.raises(DataError, match=r"smallest makes its own tasks and reads no data file; remove data\.path"):
        environment.task_from_row({}, "data.jsonl:1")


def test_an_environment_lacks_nothing():
    class Half(Environment):
        name = "half"

    with pytest.raises(TypeError):
        Half()


def test_info_of_a_task():
    task = Task(id="a", environment="smallest", messages=(), info={"size": None})
    assert info_of(task, "size") is None
    with pytest.raises(DataError, match="task a has no info field 'colour'; its environment needs it"):
        info_of(task, "colour")


def test_a_task_list_is_a_source():
    tasks = [Task(id=name, environment="smallest", messages=()) for name in "abc"]
    source = TaskList(tasks)
    tasks.clear()
    assert source.size == 3
    assert [source[index].id for index in range(3)] == ["a", "b", "c"]
    with pytest.raises(IndexError):
        source[3]


# ── calls ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def threads_name(*arguments):
    return threading.current_thread().name, arguments


async def threads_name_later(*arguments):
    await asyncio.sleep(0)
    return threads_name(*arguments)


async def test_coroutines_are_awaited_here_and_others_in_a_thread():
    here = threading.current_thread().name
    assert await call(threads_name_later, 1, 2) == (here, (1, 2))
    name, arguments = await call(threads_name, 1, 2)
    assert name != here
    assert arguments == (1, 2)


async def test_a_function_that_returns_a_coroutine_is_awaited():
    @functools.wraps(threads_name)
    def wrapped(*arguments):
        return threads_name_later(*arguments)

    assert (await call(wrapped, 1))[1] == (1,)
    assert (await call(lambda: threads_name_later(3)))[1] == (3,)
    assert (await call(functools.partial(threads_name_later, 4)))[1] == (4,)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(2)])
async def test_exceptions_come_through(error):
    def fail():
        raise error

    with pytest.raises(type(error)):
        await call(fail)


async def test_a_thread_sees_the_context_of_its_caller():
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    assert await call(lambda: variable.get()) == "set"


# ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────────────

finite = st.floats(allow_nan=False, allow_infinity=False)
messages = st.builds(Message, role=st.sampled_from(["system", "user", "assistant", "tool"]), content=st.text())


@given(
    st.builds(
        StepResult,
        messages=st.lists(messages, max_size=3).map(tuple),
        reward=finite,
        done=st.booleans(),
        state_key=st.none() | st.text(),
        counts=st.dictionaries(st.text(), finite, max_size=3),
    )
)
def test_a_proper_result_stays_as_it_is(result):
    assert checked_step(result, "a.step") == result


@given(st.dictionaries(st.text(), st.none() | finite, max_size=3))
def test_a_proper_outcome_stays_as_it_is(outcome):
    assert checked_outcome(outcome, "a.rewards") == outcome


@pytest.mark.parametrize(
    "number", [True, 1, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), Decimal(1), Fraction(1)], ids=repr
)
def test_numbers_of_all_kinds_become_plain(number):
    result = checked_step(
        StepResult(reward=number, counts={"n": number}, messages=[Message(role="tool", content="")]), "a.step"
    )
    assert (type(result.reward), result.reward) == (float, 1.0)
    assert type(result.counts["n"]) is float
    assert type(result.messages) is tuple
    outcome = checked_outcome({"answer": number}, "a.rewards")
    assert (type(outcome["answer"]), outcome) == (float, {"answer": 1.0})


BAD_NUMBERS = [float("nan"), float("inf"), np.float32("-inf"), "1", b"1", None, [1.0], np.ones(2), 10**400, 1j, object()]


@pytest.mark.parametrize("number", BAD_NUMBERS, ids=lambda number: f"{number!r:.20}")
def test_what_is_no_finite_number_is_refused(number):
    for result in (StepResult(reward=number), StepResult(counts={"n": number})):
        with pytest.raises(EnvironmentSetupError, match=r"^a\.step returned .* where it must return .*: a finite number$"):
            checked_step(result, "a.step")
    if number is not None:
        with pytest.raises(EnvironmentSetupError, match=r"^a\.rewards returned .* the component 'answer': a finite number$"):
            checked_outcome({"answer": number}, "a.rewards")


@pytest.mark.parametrize(
    "result",
    [
        None,
        (Message(role="tool", content="a"),),
        {"done": True},
        StepResult(messages=Message(role="tool", content="a")),
        StepResult(messages="a"),
        StepResult(messages=({"role": "tool", "content": "a"},)),
        StepResult(messages=(Message(role="tool", content=3),)),
        StepResult(messages=(Message(role="robot", content="a"),)),
        StepResult(state_key=("a", 1)),
        StepResult(counts=["malformed"]),
        StepResult(counts=None),
    ],
    ids=lambda result: f"{result!r:.60}",
)
def test_what_is_no_result_is_refused(result):
    with pytest.raises(EnvironmentSetupError, match=r"^a\.step returned .{1,90}, where it must return "):
        checked_step(result, "a.step")


@pytest.mark.parametrize("outcome", [None, 1.0, [1.0], "answer", {"answer"}], ids=repr)
def test_what_is_no_outcome_is_refused(outcome):
    with pytest.raises(EnvironmentSetupError, match=r"^a\.rewards returned .* where it must return reward components by name$"):
        checked_outcome(outcome, "a.rewards")
