"""Calls in threads of their own: what comes back, what is given up on, and a process that can still end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading

import pytest

from polyturn.errors import DeadlineError
from polyturn.processes.deadlines import deadline
from polyturn.processes.threads import in_thread, still_running


async def test_results_and_exceptions_come_through():
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)
    with pytest.raises(RuntimeError, match="StopIteration: 5"):
        await in_thread(_stop)
    with pytest.raises(SystemExit):
        await in_thread(_leave)


def _stop():
    raise StopIteration(5)


def _leave():
    raise SystemExit(3)


async def test_the_call_sees_the_callers_context():
    name = contextvars.ContextVar("name", default="none")
    name.set("mine")
    assert await in_thread(name.get) == "mine"


async def test_the_loop_goes_on_while_the_call_blocks():
    release = threading.Event()
    waiting = asyncio.ensure_future(in_thread(release.wait, 30))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert still_running() == ["call wait"]
    release.set()
    assert await waiting is True
    assert still_running() == []


@pytest.mark.parametrize("fails", [False, True])
async def test_the_thread_is_gone_when_the_result_is_there(fails):
    """A thread that is the last to let go of a model while the process ends would abort it."""
    inside = []

    def work():
        inside.append(threading.current_thread())
        return 1 / 0 if fails else 1

    for _ in range(200):
        with contextlib.suppress(ZeroDivisionError):
            await in_thread(work)
        assert not inside.pop().is_alive()
    assert still_running() == []


async def test_a_call_that_was_given_up_on_is_known():
    release = threading.Event()
    with pytest.raises(DeadlineError):
        async with deadline(0.01, "a call"):
            await in_thread(release.wait, 30)
    assert still_running() == ["call wait"]
    release.set()
    for thread in threading.enumerate():
        if thread.name == "call wait":
            thread.join(30)
    assert still_running() == []
