"""Calls of tools: what the model did wrong is an observation, what broke outside of it is raised, and no call is for ever."""

from __future__ import annotations

import asyncio
import dataclasses
import decimal
import json
import re
import threading

import pytest

from parts import author_tools
from polyturn.environments.tools import ToolError
from polyturn.environments.tools import toolbox as toolbox_module
from polyturn.environments.tools.functions import function_tool
from polyturn.environments.tools.toolbox import Limits, Toolbox, as_text
from polyturn.errors import EnvironmentSetupError, ResourceError
from polyturn.processes.threads import still_running
from polyturn.rendering.tool_calls import MalformedCall, ToolCall


def made(*functions, errors="raise", parallel=False, **limits):
    return Toolbox([function_tool(item) for item in functions], Limits(**limits), errors=errors, parallel=parallel)


def called(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


def raising(error):
    def fail() -> str:
        raise error

    return made(fail)


async def test_calls_in_order_with_their_results():
    box = made(author_tools.add, author_tools.price)
    answered = await box.answer([called("add", a=1, b=2), called("price", item="lamp"), called("add", a=5)], None)
    assert answered.texts == ["3", "24", "5"]
    assert answered.counts == {"calls": 3}


async def test_what_can_not_be_read_is_malformed_and_nothing_else_is():
    box = made(author_tools.add)
    answered = await box.answer(
        [MalformedCall(problem="no JSON"), called("ad", a=1), called("add", a="1"), called("add"), called("add", a=1, c=2)],
        None,
    )
    assert all(text.startswith("error: ") for text in answered.texts)
    assert answered.texts[:2] == ["error: no JSON", "error: there is no tool 'ad'; did you mean add?"]
    assert answered.counts == {"calls": 5, "malformed": 5}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ToolError("there is no lamp"), "error: there is no lamp"),
        (ToolError(), "error: ToolError: "),
        (ValueError("too small"), "error: ValueError: too small"),
        (TypeError("no"), "error: TypeError: no"),
        (ZeroDivisionError("division by zero"), "error: ZeroDivisionError: division by zero"),
        (KeyError("lamp"), "error: KeyError: 'lamp'"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), "error: UnicodeDecodeError: "),
    ],
)
async def test_the_models_doing_is_an_observation(error, said):
    answered = await raising(error).answer([called("fail")], None)
    assert answered.texts[0].startswith(said)
    assert answered.counts == {"calls": 1, "tool_error": 1}


class BadAnswer(OSError, ValueError):
    """As requests' JSONDecodeError: a ValueError that the network made."""


@pytest.mark.parametrize(
    "error", [ConnectionError("gone"), RuntimeError("broken"), BadAnswer("no JSON"), AssertionError(), SystemExit(3)]
)
async def test_anything_else_is_raised(error):
    with pytest.raises(type(error)):
        await raising(error).answer([called("fail")], None)


@pytest.mark.parametrize("error", [ConnectionError("gone"), RuntimeError("broken")])
async def test_unless_the_author_says_observe(error):
    def fail() -> str:
        raise error

    answered = await made(fail, errors="observe").answer([called("fail")], None)
    assert answered.texts == [f"error: {type(error).__name__}: {error}"]
    assert answered.counts["tool_error"] == 1


async def test_a_tool_that_leaves_is_raised_also_with_observe():
    def leave() -> str:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await made(leave, errors="observe").answer([called("leave")], None)


async def test_a_tool_cancelled_from_inside_is_no_cancellation_of_ours():
    async def cancelled() -> str:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="tool cancelled was cancelled from inside"):
        await made(cancelled).answer([called("cancelled")], None)


# ── deadlines ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def released():
    author_tools.release.clear()
    yield author_tools.release
    author_tools.release.set()


@pytest.mark.parametrize("tool", [author_tools.stuck, author_tools.slow])
async def test_a_call_past_its_deadline_is_an_observation(tool, released):
    box = made(tool, author_tools.add, call_deadline_s=0.05)
    answered = await box.answer([called(tool.__name__, n=1), called("add", a=1)], None)
    assert answered.texts == [f"error: {tool.__name__} did not end within 0.05 s", "1"]
    assert answered.counts == {"calls": 2, "tool_timeout": 1}


async def test_the_calls_of_a_reply_share_a_deadline(released):
    box = made(author_tools.slow, author_tools.add, call_deadline_s=60, turn_deadline_s=0.05)
    answered = await box.answer([called("slow", n=1), called("add", a=1)], None)
    # Whatever was left of the deadline when it was called, to three digits.
    assert re.fullmatch(r"error: slow did not end within 0\.0[0-9]+ s", answered.texts[0])
    assert answered.texts[1] == "error: add was not called: the calls of this reply took too long"
    assert answered.counts == {"calls": 2, "tool_timeout": 2}


async def test_threads_that_do_not_come_back_are_bounded(released, monkeypatch):
    monkeypatch.setattr(toolbox_module, "MAX_STUCK", 2)
    box = made(author_tools.stuck, call_deadline_s=0.02)
    for _ in range(2):
        assert (await box.answer([called("stuck", n=1)], None)).counts["tool_timeout"] == 1
    assert "call of tool stuck" in still_running()
    with pytest.raises(ResourceError, match="2 calls of tools passed their deadline and never came back"):
        await box.answer([called("stuck", n=1)], None)
    released.set()
    await asyncio.get_running_loop().run_in_executor(None, wait_for_threads)
    assert (await box.answer([called("stuck", n=7)], None)).texts == ["7"], "what came back late makes room again"


def wait_for_threads():
    for thread in threading.enumerate():
        if thread.name == "call of tool stuck":
            thread.join(5)


async def test_a_coroutine_that_ignores_its_deadline_counts_as_stuck(monkeypatch):
    monkeypatch.setattr(toolbox_module, "MAX_STUCK", 1)
    monkeypatch.setattr(toolbox_module, "GRACE_S", 0.02)
    goes_on = asyncio.Event()

    async def stubborn() -> str:
        while not goes_on.is_set():
            try:
                await goes_on.wait()
            except asyncio.CancelledError:
                continue
        return "at last"

    box = made(stubborn, call_deadline_s=0.02)
    assert (await box.answer([called("stubborn")], None)).counts["tool_timeout"] == 1
    with pytest.raises(ResourceError, match="never came back"):
        await box.answer([called("stubborn")], None)
    goes_on.set()
    await asyncio.sleep(0.01)
    assert (await box.answer([called("stubborn")], None)).texts == ["at last"]


async def test_a_cancelled_run_cancels_its_call():
    ended = asyncio.Event()

    async def long() -> str:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()
        return ""

    task = asyncio.create_task(made(long).answer([called("long")], None))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 1)


# ── several calls, and results ─────────────────────────────────────────────────────────────────────────────────────────


async def test_parallel_calls_run_at_once_and_answer_in_order():
    arrived, all_here = [], asyncio.Event()

    async def meet(n: int) -> int:
        arrived.append(n)
        if len(arrived) == 3:
            all_here.set()
        await all_here.wait()
        return n

    answered = await made(meet, parallel=True, call_deadline_s=5).answer([called("meet", n=n) for n in range(3)], None)
    assert answered.texts == ["0", "1", "2"]
    assert answered.counts == {"calls": 3}


async def test_a_fault_among_parallel_calls_is_raised_when_all_have_ended():
    ended = []

    async def work(n: int) -> int:
        if n == 0:
            raise ConnectionError("gone")
        await asyncio.sleep(0.01)
        ended.append(n)
        return n

    with pytest.raises(ConnectionError):
        await made(work, parallel=True).answer([called("work", n=n) for n in range(3)], None)
    assert ended == [1, 2]


async def test_only_so_many_calls_a_reply():
    box = made(author_tools.add, max_calls_per_turn=2)
    answered = await box.answer([called("add", a=n) for n in range(5)], None)
    assert answered.texts == ["0", "1", "error: only the first 2 calls of a reply are made"]
    assert answered.counts == {"calls": 2, "calls_not_made": 3}


@pytest.mark.parametrize(("length", "cut"), [(9, False), (10, False), (11, True), (5000, True)])
async def test_long_results_lose_their_middle(length, cut):
    text = "".join(chr(97 + index % 26) for index in range(length))

    def say() -> str:
        return text

    answered = await made(say, output_max_chars=10).answer([called("say")], None)
    if not cut:
        assert answered.texts == [text]
        return
    assert answered.texts == [f"{text[:5]}\n[... {length - 10} characters left out ...]\n{text[-5:]}"]
    assert answered.counts == {"calls": 1, "output_cut": 1}


async def test_long_errors_lose_theirs_too():
    def fail(word: str) -> str:
        raise ValueError(word)

    answered = await made(fail, output_max_chars=20).answer([called("fail", word="x" * 1000)], None)
    assert answered.texts == [f"error: Val\n[... {len('error: ValueError: ') + 980} characters left out ...]\n{'x' * 10}"]
    assert answered.counts == {"calls": 1, "tool_error": 1, "output_cut": 1}


@dataclasses.dataclass
class Item:
    name: str
    price: decimal.Decimal


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (None, "null"),
        (True, "true"),
        (Item("Lämpchen", decimal.Decimal("1.5")), '{"name": "Lämpchen", "price": "1.5"}'),
        ({1: (2, 3)}, '{"1": [2, 3]}'),
        (float("inf"), "Infinity"),
    ],
)
def test_results_that_are_no_text_are_json(value, text):
    assert as_text("tool", value) == text


class Odd:
    pass


def looped():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [Odd(), {"x": Odd()}, b"\xff", looped()], ids=["object", "inside", "bytes", "loop"])
def test_what_json_can_not_say_is_a_fault_of_the_author(value):
    with pytest.raises(EnvironmentSetupError, match=r"tool find returned a .* that JSON can't say"):
        as_text("find", value)


def test_json_comes_back_as_it_was():
    value = {"a": [1, 2.5, None, "ü"], "b": {"c": True}}
    assert json.loads(as_text("find", value)) == value


# ── what is refused at the start ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["call_deadline_s", "turn_deadline_s", "output_max_chars", "max_calls_per_turn"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", True, None])
def test_limits_that_are_none(name, value):
    with pytest.raises(EnvironmentSetupError, match=rf"environment\.args\.{name}=.* must be a number above 0"):
        Limits(**{name: value})


def test_toolboxes_that_are_refused():
    with pytest.raises(EnvironmentSetupError, match="two tools are called 'add'"):
        made(author_tools.add, author_tools.add)
    with pytest.raises(EnvironmentSetupError, match="add is none; make it async def"):
        made(author_tools.price, author_tools.add, parallel=True)
    with pytest.raises(EnvironmentSetupError, match="did you mean observe"):
        made(author_tools.add, errors="obserfe")
