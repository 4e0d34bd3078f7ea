"""Deadlines name the wait, nest, and never take a cancellation that was not theirs. With and without Task.uncancel."""

# ruff: noqa: PT012 - what a block raises as a whole is what is tested here

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from polyturn.errors import DeadlineError
from polyturn.processes import deadlines
from polyturn.processes.deadlines import deadline, run_with_deadline

FOREVER = 3600.0


@pytest.fixture(autouse=True, params=[True, False], ids=["counting", "by message"])
def counting(request, monkeypatch):
    """Both ways of telling cancellations apart; the second is what Python 3.10 has."""
    if request.param and not hasattr(asyncio.Task, "uncancel"):
        pytest.skip("this Python does not count cancellations")
    monkeypatch.setattr(deadlines, "_COUNTS_CANCELLATIONS", request.param)
    return request.param


async def test_a_wait_in_time_gives_its_result():
    async with deadline(5, "nothing"):
        result = await asyncio.sleep(0, "done")
    assert result == "done"


async def test_a_wait_too_long_names_itself_and_the_seconds():
    began = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        async with deadline(0.02, "the engine's reply in turn 2"):
            await asyncio.sleep(FOREVER)
    assert str(caught.value) == "waited 0.02 s for the engine's reply in turn 2, which is its deadline, and it did not come"
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    assert time.monotonic() - began < 2


async def test_the_task_can_go_on_after_a_deadline(counting):
    for _ in range(3):
        with pytest.raises(DeadlineError):
            async with deadline(0, "nothing"):
                await asyncio.sleep(FOREVER)
    await asyncio.sleep(0.01)
    if counting:
        assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize(("outer", "inner", "named"), [(0.02, FOREVER, "outer"), (FOREVER, 0.02, "inner")])
async def test_of_nested_deadlines_the_one_that_passed_is_raised(outer, inner, named):
    with pytest.raises(DeadlineError, match=f"for the {named} wait"):
        async with deadline(outer, "the outer wait"), deadline(inner, "the inner wait"):
            await asyncio.sleep(FOREVER)


async def test_an_inner_deadline_can_be_survived():
    async with deadline(FOREVER, "the outer wait"):
        with pytest.raises(DeadlineError, match="inner"):
            async with deadline(0, "the inner wait"):
                await asyncio.sleep(FOREVER)
        assert await asyncio.sleep(0.01, "alive") == "alive"


async def test_two_deadlines_that_pass_at_once_raise_one_error():
    with pytest.raises(DeadlineError):
        async with deadline(0, "a"), deadline(0, "b"):
            await asyncio.sleep(FOREVER)
    await asyncio.sleep(0.01)


async def test_a_cancellation_from_outside_stays_one():
    async def work():
        async with deadline(FOREVER, "nothing"):
            await asyncio.sleep(FOREVER)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_from_outside_wins_over_a_deadline_that_has_passed():
    cleaning = asyncio.Event()

    async def work():
        async with deadline(0.01, "nothing"):
            try:
                await asyncio.sleep(FOREVER)
            finally:
                cleaning.set()
                await asyncio.sleep(FOREVER)

    task = asyncio.create_task(work())
    await cleaning.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_of_the_block_come_through():
    with pytest.raises(KeyError):
        async with deadline(FOREVER, "nothing"):
            raise KeyError
    with pytest.raises(KeyError):
        async with deadline(0.01, "nothing"):
            try:
                await asyncio.sleep(FOREVER)
            except asyncio.CancelledError:
                raise KeyError from None


async def test_a_block_that_swallows_its_cancellation_is_still_late():
    with pytest.raises(DeadlineError):
        async with deadline(0.01, "nothing"):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(FOREVER)


async def test_deadlines_work_around_gather_and_wait_for():
    with pytest.raises(DeadlineError, match="outer"):
        async with deadline(0.02, "the outer wait"):
            await asyncio.wait_for(asyncio.gather(asyncio.sleep(FOREVER), asyncio.sleep(FOREVER)), FOREVER)


async def test_many_concurrent_deadlines_are_told_apart():
    async def work(number: int) -> str:
        try:
            async with deadline(0.01 if number % 2 else FOREVER, f"wait {number}"):
                return await asyncio.sleep(0.05, f"result {number}")
        except DeadlineError as error:
            return str(error).split(", ")[0]

    expected = [f"waited 0.01 s for wait {number}" if number % 2 else f"result {number}" for number in range(20)]
    assert await asyncio.gather(*map(work, range(20))) == expected


def test_a_blocking_call_gives_its_result_and_its_errors():
    assert run_with_deadline(lambda: threading.current_thread().daemon, 5, "a thread") is True
    with pytest.raises(ZeroDivisionError):
        run_with_deadline(lambda: 1 // 0, 5, "a division")


def test_a_blocking_call_is_given_up_on():
    release = threading.Event()
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for a stuck call"):
        run_with_deadline(lambda: release.wait(30), 0.05, "a stuck call")
    assert time.monotonic() - began < 5
    release.set()


async def test_deadlines_of_one_length_share_a_timer_and_end_each_at_its_own_time():
    loop, timers = asyncio.get_running_loop(), []

    def counted(when, callback, *arguments, **options):
        timers.append(when)
        return kept(when, callback, *arguments, **options)

    async def hold(number):
        async with deadline(30.0, f"number {number}"):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    kept, loop.call_at = loop.call_at, counted
    try:
        await asyncio.gather(*map(hold, range(1000)))
    finally:
        del loop.call_at
    assert len(timers) == 1


async def test_the_first_ends_and_the_last_still_does():
    ended = []

    async def wait(name, begin_s):
        await asyncio.sleep(begin_s)
        try:
            async with deadline(0.06, name):
                await asyncio.sleep(0.0 if name == "done" else 30)
        except DeadlineError as error:
            ended.append(str(error))

    await asyncio.gather(wait("first", 0.0), wait("done", 0.01), wait("last", 0.03))
    assert [("first" in text, "last" in text) for text in ended] == [(True, False), (False, True)]


async def test_no_timer_stays_when_the_last_deadline_is_over():
    loop = asyncio.get_running_loop()
    before = len(loop._scheduled)
    async with deadline(77.0, "a while"):
        assert len(loop._scheduled) == before + 1
    assert all(timer.cancelled() for timer in loop._scheduled[before:])


async def test_lengths_that_nobody_waits_for_are_forgotten():
    async with deadline(500.0, "the one that goes on"):
        for number in range(1000):
            async with deadline(100.0 + number / 7, "what is left"):
                pass
        kept = deadlines._rows.by_length
        assert len(kept) <= deadlines._MOST_ROWS
        assert not kept[500.0].empty


def test_a_loop_in_a_thread_that_ran_another_one_has_its_own():
    async def passes():
        with pytest.raises(DeadlineError):
            async with deadline(0.01, "nothing"):
                await asyncio.sleep(30)

    inner = asyncio.new_event_loop()
    asyncio.run(passes())
    asyncio.run(passes())
    inner.run_until_complete(passes())
    inner.close()
