"""A blocking call in a thread of its own: its result, its exceptions, and nothing kept waiting when it hangs."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S
from polyturn.errors import DeadlineError
from polyturn.processes import threads
from polyturn.processes.deadlines import deadline
from polyturn.processes.threads import in_thread, in_thread_within, still_running

SOURCE = Path(__file__).parents[3] / "src"


class Special(BaseException):
    pass


def comes_back(name: str) -> None:
    """Wait until a call is no longer under way."""
    until = time.monotonic() + 30
    while name in still_running():
        assert time.monotonic() < until, f"{name} does not come back"
        time.sleep(0.001)


async def test_result_and_arguments():
    assert await in_thread(lambda *arguments: (arguments, threading.current_thread().daemon), 1, "b") == ((1, "b"), True)
    assert await in_thread(lambda: None) is None


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), Special("now")], ids=repr)
async def test_exceptions_come_through_as_they_are(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        await in_thread(fail)
    assert caught.value is error


@pytest.mark.parametrize("error", [StopIteration("end"), asyncio.CancelledError("inner")], ids=repr)
async def test_exceptions_that_mean_something_to_the_loop_are_wrapped(error):
    def fail():
        raise error

    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: {error}"):
        await in_thread(fail)


async def test_a_call_that_never_returns_is_left_alone():
    release, ended = threading.Event(), threading.Event()

    def hang():
        release.wait(PATIENCE_S)
        ended.set()

    with pytest.raises(DeadlineError, match="the call"):
        async with deadline(0.05, "the call"):
            await in_thread(hang)
    assert not ended.is_set()
    release.set()
    # Its result finds nobody, and that is no error.
    assert await in_thread(ended.wait, 30)
    await asyncio.sleep(0)


async def test_an_error_after_the_deadline_finds_nobody():
    release, raised = threading.Event(), threading.Event()

    def hang():
        release.wait(PATIENCE_S)
        raised.set()
        raise ValueError("too late")

    with pytest.raises(DeadlineError):
        async with deadline(0.05, "the call"):
            await in_thread(hang)
    release.set()
    assert await in_thread(raised.wait, 30)
    await asyncio.sleep(0)


def test_a_loop_that_is_closed_meanwhile_is_no_error():
    """pytest makes an unhandled exception of a thread an error of the test."""
    release = threading.Event()

    def hang_meanwhile():
        release.wait(PATIENCE_S)

    async def give_up():
        with pytest.raises(DeadlineError):
            async with deadline(0.05, "the call"):
                await in_thread(hang_meanwhile)

    asyncio.run(give_up())
    release.set()
    comes_back("call hang_meanwhile")


async def test_many_calls_that_hang_leave_room_for_others():
    """The threads of a pool would be used up."""
    release = threading.Event()
    hanging = [asyncio.create_task(in_thread(release.wait, 30)) for _ in range(50)]
    assert await in_thread(lambda: "through") == "through"
    assert not any(task.done() for task in hanging)
    release.set()
    assert await asyncio.gather(*hanging) == [True] * 50


async def test_the_context_is_the_callers_and_stays_so():
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("mine")

    def change():
        seen = variable.get()
        variable.set("theirs")
        return seen

    assert await in_thread(change) == "mine"
    assert variable.get() == "mine"


async def test_a_thread_is_named_after_its_call():
    def slow_tool():
        return threading.current_thread().name

    assert await in_thread(slow_tool) == "call slow_tool"


class Model:
    """Something that must not be held."""


@pytest.mark.parametrize("fails", [False, True])
async def test_a_thread_holds_nothing_when_its_result_is_there(fails):
    """A thread that is the last to let go of a model while the process ends would abort it."""

    def work(model):
        return model.missing if fails else model

    for _ in range(200):
        model = Model()
        seen = weakref.ref(model)
        try:
            await in_thread(work, model)
        except AttributeError as error:
            error.__traceback__ = None
            del error
        del model
        await asyncio.sleep(0)  # the loop holds what it has just woken us with
        assert seen() is None


async def test_threads_that_have_come_back_take_the_next_calls():
    names = {await in_thread(threading.get_ident) for _ in range(50)}
    assert len(names) <= 5, "of fifty; one that is about to be idle may be missed"


async def test_a_thread_without_calls_ends(monkeypatch):
    monkeypatch.setattr(threads, "IDLE_S", 0.01)
    threads._idle.clear()  # those wait longer
    thread = await in_thread(threading.current_thread)
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
    # One of an earlier test may only now have come to be idle.
    assert thread not in [worker.thread for worker in threads._idle]
    assert await in_thread(lambda: "again") == "again"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_child_of_a_fork_starts_threads_of_its_own():
    await in_thread(lambda: None)
    child = os.fork()
    if child == 0:
        os._exit(asyncio_in_a_new_thread())
    code = await asyncio.to_thread(lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert code == 7


def asyncio_in_a_new_thread() -> int:
    """The exit code 7 when a call comes back; a loop runs in the thread that forked already."""
    found = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(in_thread_within(20, "a call", lambda: 7))))
    thread.start()
    thread.join(PATIENCE_S)
    return found[0] if found else 1


async def test_a_call_that_was_given_up_on_is_known_until_it_comes_back():
    release = threading.Event()

    def given_up_on():
        release.wait(PATIENCE_S)

    with pytest.raises(DeadlineError):
        async with deadline(0.05, "the call"):
            await in_thread(given_up_on)
    assert "call given_up_on" in still_running()
    release.set()
    comes_back("call given_up_on")


async def test_a_call_whose_thread_has_not_come_to_it_counts_as_well(monkeypatch):
    """On a busy machine a deadline passes before a new thread runs at all; who then leaves must not wait for the call's end."""
    may_run, run = threading.Event(), threads._Worker._run

    def late(worker):
        may_run.wait(PATIENCE_S)
        run(worker)

    def never_begun():
        pass

    monkeypatch.setattr(threads, "_idle", deque())
    monkeypatch.setattr(threads._Worker, "_run", late)
    with pytest.raises(DeadlineError):
        await in_thread_within(0.01, "the call", never_begun)
    assert "call never_begun" in still_running()
    may_run.set()
    comes_back("call never_begun")


HANGING = """
import asyncio, threading
from polyturn.processes.threads import in_thread, still_running

async def main():
    call = asyncio.create_task(in_thread(threading.Event().wait))
    await asyncio.sleep(0.01)
    call.cancel()

asyncio.run(main())
print(still_running())
"""


def test_a_call_that_hangs_does_not_hold_up_the_exit():
    run = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE)}, timeout=PATIENCE_S
    )
    assert (run.returncode, run.stdout.strip()) == (0, "['call wait']"), run.stderr


async def test_a_call_within_a_deadline_gives_its_result_or_names_the_wait():
    assert await in_thread_within(30, "an answer", lambda number: number + 1, 1) == 2
    release = threading.Event()
    try:
        with pytest.raises(DeadlineError, match=r"waited 0\.05 s for a call that hangs"):
            await in_thread_within(0.05, "a call that hangs", release.wait, 60)
    finally:
        release.set()


async def test_short_calls_that_come_together_share_a_thread(monkeypatch):
    """To wake a thread for each would cost more than the calls do."""
    monkeypatch.setattr(threads, "LOOK_S", 30.0)
    monkeypatch.setattr(threads, "QUICK_S", 30.0)
    monkeypatch.setattr(threads, "_idle", deque())
    await asyncio.gather(*(in_thread(lambda: None) for _ in range(10)))  # the thread has started
    names = await asyncio.gather(*(in_thread(threading.get_ident) for _ in range(500)))
    assert len(set(names)) <= 5, "of five hundred; one that is about to be idle may be missed"


async def test_calls_that_are_quick_and_too_many_get_more_threads(monkeypatch):
    """A tool that takes its time outside the interpreter would otherwise have one core."""
    monkeypatch.setattr(threads, "QUICK_S", 30.0)
    monkeypatch.setattr(threads, "_idle", deque())
    met = threading.Barrier(4, timeout=PATIENCE_S)
    assert sorted(await asyncio.gather(*(in_thread(met.wait) for _ in range(4)))) == [0, 1, 2, 3]


async def test_calls_behind_one_that_hangs_get_threads_of_their_own():
    """All of them, though no call comes after them."""
    release, others = threading.Event(), threading.Barrier(20, timeout=PATIENCE_S)
    hanging = asyncio.create_task(in_thread(release.wait, 30))
    waiting = [asyncio.create_task(in_thread(others.wait)) for _ in range(20)]
    assert sorted(await asyncio.gather(*waiting)) == list(range(20))
    assert not hanging.done()
    release.set()
    assert await hanging


async def test_a_call_from_another_loop_gets_past_one_that_hangs():
    """The loop whose call hangs is itself held up, and looks after nobody."""
    release = threading.Event()

    async def hang_and_block():
        hanging = asyncio.create_task(in_thread(release.wait, 30))
        await asyncio.sleep(0)
        release.wait(PATIENCE_S)  # in the loop
        assert await hanging

    thread = threading.Thread(target=asyncio.run, args=(hang_and_block(),))
    thread.start()
    await asyncio.sleep(0.05)
    assert await in_thread_within(20, "the other loop's call", lambda: "through") == "through"
    release.set()
    await asyncio.to_thread(thread.join, 30)


def test_every_call_comes_back_whoever_takes_it():
    """Several loops, calls short and long, threads that fall idle in between: none is forgotten, none runs twice."""
    ran: deque[int] = deque()

    def work(number):
        ran.append(number)
        if number % 7 == 0:
            time.sleep(0.003)
        return number

    async def ask(first):
        found = []
        for start in range(first, first + 600, 60):
            found += await asyncio.gather(*(in_thread_within(60, "a call", work, start + place) for place in range(60)))
            await asyncio.sleep(0.0005)
        assert found == list(range(first, first + 600))

    loops = [threading.Thread(target=asyncio.run, args=(ask(first),)) for first in (0, 600, 1200)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(PATIENCE_S)
    assert sorted(ran) == list(range(1800))
