"""A task set awaits everything it started and raises the first failure, wherever the block is at that time."""

# ruff: noqa: PT012 - what a block raises as a whole is what is tested here

from __future__ import annotations

import asyncio
import logging

import pytest

from polyturn.errors import DeadlineError
from polyturn.processes import deadlines
from polyturn.processes.tasks import TaskSet, left_behind

FOREVER = 3600.0


@pytest.fixture(autouse=True, params=[True, False], ids=["counting", "by message"])
def counting(request, monkeypatch):
    if request.param and not hasattr(asyncio.Task, "uncancel"):
        pytest.skip("this Python does not count cancellations")
    monkeypatch.setattr(deadlines, "_COUNTS_CANCELLATIONS", request.param)
    return request.param


async def fail(seconds: float = 0.0, error: Exception | None = None) -> None:
    await asyncio.sleep(seconds)
    raise error or KeyError("first")


def others() -> set[asyncio.Task]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_the_block_waits_for_its_tasks():
    done = []

    async def work(number: int) -> int:
        await asyncio.sleep(0.01)
        done.append(number)
        return number

    async with TaskSet("rollouts") as tasks:
        started = [tasks.start(work(number), f"rollout {number}") for number in range(5)]
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert [task.result() for task in started] == [0, 1, 2, 3, 4]


async def test_background_tasks_end_with_the_block():
    ended = []

    async def watch() -> None:
        try:
            await asyncio.sleep(FOREVER)
        finally:
            ended.append("watch")

    async with TaskSet("watchers") as tasks:
        tasks.start(watch(), "watch", background=True)
        tasks.start(asyncio.sleep(0.01), "work")
    assert ended == ["watch"]
    assert not others()


@pytest.mark.parametrize("background", [False, True])
async def test_a_failure_interrupts_a_block_that_waits_for_something_else(background, counting):
    reached = False
    with pytest.raises(KeyError, match="first"):
        async with TaskSet("rollouts") as tasks:
            tasks.start(fail(), "rollout 1", background=background)
            tasks.start(asyncio.sleep(FOREVER), "rollout 2")
            await asyncio.sleep(FOREVER)
            reached = True
    assert not reached
    assert not others()
    await asyncio.sleep(0.01)
    if counting:
        assert asyncio.current_task().cancelling() == 0


async def test_a_failure_after_the_block_cancels_the_others():
    with pytest.raises(KeyError, match="first"):
        async with TaskSet("rollouts") as tasks:
            tasks.start(fail(0.01), "rollout 1")
            tasks.start(asyncio.sleep(FOREVER), "rollout 2")
    assert not others()


async def test_the_first_failure_is_raised_and_later_ones_are_logged(caplog):
    async def fail_while_ending() -> None:
        try:
            await asyncio.sleep(FOREVER)
        finally:
            raise ValueError("second")

    with caplog.at_level(logging.WARNING), pytest.raises(KeyError, match="first"):
        async with TaskSet("rollouts") as tasks:
            tasks.start(fail_while_ending(), "rollout 2")
            tasks.start(fail(0.01), "rollout 1")
    assert caplog.messages == ["rollout 2 failed too: ValueError: second"]


async def test_an_error_of_the_block_cancels_the_tasks_and_stays_the_error():
    async def fail_while_ending() -> None:
        try:
            await asyncio.sleep(FOREVER)
        finally:
            raise ValueError("second")

    with pytest.raises(ZeroDivisionError):
        async with TaskSet("rollouts") as tasks:
            tasks.start(fail_while_ending(), "rollout 1")
            await asyncio.sleep(0.01)
            raise ZeroDivisionError
    assert not others()


async def test_a_failure_before_an_error_of_the_block_is_raised():
    with pytest.raises(KeyError, match="first"):
        async with TaskSet("rollouts") as tasks:
            tasks.start(fail(), "rollout 1")
            try:
                await asyncio.sleep(FOREVER)
            finally:
                raise ZeroDivisionError


@pytest.mark.parametrize("in_block", [True, False])
async def test_a_cancellation_from_outside_stays_one_and_ends_the_tasks(in_block):
    inner = []

    async def work() -> None:
        async with TaskSet("rollouts") as tasks:
            inner.append(tasks.start(asyncio.sleep(FOREVER), "rollout 1"))
            if in_block:
                await asyncio.sleep(FOREVER)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inner[0].cancelled()


async def test_a_task_cancelled_by_someone_is_no_failure():
    async with TaskSet("rollouts") as tasks:
        tasks.start(asyncio.sleep(FOREVER), "rollout 1").cancel()


async def test_a_task_that_does_not_end_is_named():
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for stubborn one of watchers to end after being cancelled"):
        async with TaskSet("watchers", grace_s=0.05) as tasks:
            tasks.start(stubborn(), "stubborn one", background=True)
            await asyncio.sleep(0.01)
    assert left_behind() == ["stubborn one"]
    assert not others(), "the end of the loop does not wait for it"
    release.set()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not left_behind()


async def test_tasks_may_start_tasks_until_all_have_ended():
    async def parent(tasks: TaskSet) -> None:
        await asyncio.sleep(0.01)
        tasks.start(asyncio.sleep(0.01), "child")

    async with TaskSet("rollouts") as tasks:
        tasks.start(parent(tasks), "parent")
    coroutine = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="late can't be started: rollouts are ending"):
        tasks.start(coroutine, "late")


async def test_sets_nest():
    with pytest.raises(KeyError, match="first"):
        async with TaskSet("outer") as outer:
            outer.start(fail(0.01), "outer task")
            async with TaskSet("inner") as inner:
                inner.start(asyncio.sleep(FOREVER), "inner task")
    assert not others()


async def test_a_deadline_around_a_set_ends_it():
    with pytest.raises(DeadlineError, match="for all rollouts"):
        async with deadlines.deadline(0.02, "all rollouts"), TaskSet("rollouts") as tasks:
            tasks.start(asyncio.sleep(FOREVER), "rollout 1")
    assert not others()
