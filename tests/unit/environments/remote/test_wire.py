"""What is read equals what was written, and what can't be written or read is refused in a sentence."""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import math
import struct
import types

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from polyturn.environments.base import Reply, StepResult
from polyturn.environments.calls import checked_outcome, checked_step
from polyturn.environments.remote import wire
from polyturn.environments.remote.faults import AuthorError, from_error, to_error
from polyturn.errors import DataError, DeadlineError, EnvironmentSetupError, PolyturnError, ResourceError
from polyturn.types import Message, Task

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates as well
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
KEYS = ANY_TEXT | st.sampled_from(["()", "{}"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | ANY_TEXT,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=20,
)
MESSAGES = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "assistant", "tool"]), content=ANY_TEXT), max_size=4
).map(tuple)
TASKS = st.builds(
    Task,
    id=ANY_TEXT,
    environment=ANY_TEXT,
    messages=MESSAGES,
    answer=st.none() | ANY_TEXT,
    info=st.dictionaries(KEYS, VALUES, max_size=4),
)
STEPS = st.builds(
    StepResult,
    messages=MESSAGES,
    reward=NUMBERS,
    done=st.booleans(),
    state_key=st.none() | ANY_TEXT,
    counts=st.dictionaries(ANY_TEXT, NUMBERS, max_size=3),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["id", "()", "{}"]), inner, max_size=2),
    max_leaves=4,
)
FEW = settings(max_examples=50)


def sent(document):
    """Through a frame and back."""
    return wire.unpack(wire.pack({"it": document}, "it"))["it"]


def identical(one, other):
    """Equal, of the same types all the way down, floats bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    return one == other


@FEW
@given(TASKS)
def test_a_task_arrives_as_it_is(task):
    arrived = wire.to_task(sent(wire.from_task(task)))
    assert arrived == task
    assert identical(arrived.info, task.info)


@given(st.builds(Reply, text=ANY_TEXT, truncated=st.booleans(), num_tokens=st.integers(0, 10**9)))
def test_a_reply_arrives_as_it_is(reply):
    arrived = wire.to_reply(sent(wire.from_reply(reply)))
    assert (arrived, arrived.num_tokens) == (reply, reply.num_tokens)


@given(STEPS)
def test_a_result_arrives_as_it_is(result):
    arrived = wire.to_step(sent(wire.from_step(checked_step(result, "step"))))
    assert arrived == result
    assert identical(dict(arrived.counts), dict(result.counts))
    assert identical(arrived.reward, result.reward)


@given(st.dictionaries(ANY_TEXT, st.none() | NUMBERS))
def test_an_outcome_arrives_as_it_is(outcome):
    assert identical(wire.to_outcome(sent(checked_outcome(outcome, "rewards"))), outcome)


TASK = Task(id="a", environment="b", messages=(Message(role="user", content="x"),), answer="y", info={"z": (1,)})
STEP = StepResult(messages=TASK.messages, reward=0.5, state_key="k", counts={"n": 1.0})
VALID = [
    (wire.to_request, {"id": 3, "op": "setup", "task": wire.from_task(TASK)}),
    (wire.to_request, {"id": 4, "op": "step", "handle": 3, "reply": wire.from_reply(Reply(text="x"))}),
    (wire.to_step, wire.from_step(STEP)),
    (wire.to_outcome, {"answer": 1.0}),
]


def places(document):
    """Every place in a document, as its container and the key there."""
    for key in document if isinstance(document, dict) else range(len(document)):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from places(document[key])


@settings(max_examples=150)
@given(st.sampled_from(VALID), st.integers(0, 30), JSON)
def test_a_frame_with_something_else_in_one_place_is_read_or_refused(valid, place, value):
    read, document = valid[0], copy.deepcopy(valid[1])
    found = list(places(document))
    container, key = found[place % len(found)]
    container[key] = value
    with contextlib.suppress(ResourceError):
        read(wire.unpack(json.dumps(document).encode()))


def is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


@given(st.binary())
@example(b"{")
def test_bytes_that_are_no_frame_are_refused(data):
    assume(not is_object(data))  # `{}` is one of what bytes can be
    with pytest.raises(ResourceError, match="breaks the protocol"):
        wire.unpack(data)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": -Infinity}', "[1]", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"])
def test_frames_that_are_no_json_objects_of_finite_numbers_are_refused(text):
    with pytest.raises(ResourceError, match="breaks the protocol"):
        wire.unpack(text.encode())


def test_a_request():
    task = Task(id="a", environment="b", messages=())
    document = {"id": 3, "op": "setup", "task": wire.from_task(task)}
    assert wire.to_request(document) == wire.Request(id=3, op="setup", task=task)
    document = {"id": 4, "op": "step", "handle": 3, "reply": wire.from_reply(Reply(text="x"))}
    assert wire.to_request(document) == wire.Request(id=4, op="step", handle=3, reply=Reply(text="x"))


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"id": 1},
        {"id": 1, "op": "start"},
        {"id": -1, "op": "close"},
        {"id": True, "op": "close"},
        {"id": 1, "op": ["close"]},
        {"id": 1, "op": "close", "handle": "1"},
        {"id": 1, "op": "setup"},
        {"id": 1, "op": "step", "handle": 0, "reply": {"text": 1, "truncated": False, "num_tokens": 0}},
        {"id": 1, "op": "setup", "task": {"id": "a", "environment": "b", "messages": [["model", "x"]], "info": {}}},
        {"id": 1, "op": "setup", "task": {"id": "a", "environment": "b", "messages": [], "info": []}},
    ],
)
def test_requests_that_are_none(document):
    with pytest.raises(ResourceError, match="breaks the protocol"):
        wire.to_request(document)


# ── what can't be sent ─────────────────────────────────────────────────────────────────────────────────────────────────


class Point(tuple):
    __slots__ = ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {1, 2}, b"x", {1: "a"}, object(), Point((1, 2))])
def test_a_task_that_json_cannot_hold(value):
    task = Task(id="rows:3", environment="mine", messages=(), info={"deep": [{"x": (value,)}]})
    with pytest.raises(
        EnvironmentSetupError, match=r"^task rows:3 holds .*, which can't be sent to an environment process; use"
    ):
        wire.from_task(task)


def test_a_task_that_is_nested_without_end():
    info: dict[str, object] = {}
    info["self"] = info
    with pytest.raises(EnvironmentSetupError, match="task a is nested too deep"):
        wire.from_task(Task(id="a", environment="b", messages=(), info=info))


def test_a_number_of_too_many_digits():
    with pytest.raises(EnvironmentSetupError, match="task a can't be sent"):
        wire.pack({"task": wire.from_task(Task(id="a", environment="b", messages=(), info={"n": 10**5000}))}, "task a")


def test_mappings_of_other_kinds_arrive_as_dictionaries():
    info = types.MappingProxyType({"counts": collections.Counter(a=2)})
    arrived = wire.to_task(sent(wire.from_task(Task(id="a", environment="b", messages=(), info=info))))
    assert arrived.info == {"counts": {"a": 2}}


def test_a_frame_that_is_too_large(monkeypatch):
    assert wire.MOST_BYTES == 64 << 20
    monkeypatch.setattr(wire, "MOST_BYTES", 1000)
    assert len(wire.pack({"x": "y" * 992}, "task a")) == 1000
    with pytest.raises(
        EnvironmentSetupError, match=r"^task a takes 1,001 bytes, and at most 1,000 can be sent between processes"
    ):
        wire.pack({"x": "y" * 993}, "task a")


# ── exceptions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Unshown(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Quota(ResourceError):
    """An author's own kind of one of ours."""


@pytest.mark.parametrize(
    ("error", "base", "text"),
    [
        (KeyError("x"), AuthorError, "'x' (in environment-1)"),
        (SystemExit(2), AuthorError, "2 (in environment-1)"),
        (ValueError(), AuthorError, "(in environment-1)"),
        (Unshown(), AuthorError, "it can't be shown as text (in environment-1)"),
        (EnvironmentSetupError("bad"), EnvironmentSetupError, "bad (in environment-1)"),
        (DeadlineError("late"), DeadlineError, "late (in environment-1)"),
        (DataError("row 3"), DataError, "row 3 (in environment-1)"),
        (Quota("spent"), ResourceError, "spent (in environment-1)"),
        (PolyturnError("what"), PolyturnError, "what (in environment-1)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_exception_comes_back_under_its_name(error, base, text):
    back = to_error(sent(from_error(error)), "environment-1")
    assert isinstance(back, base)
    assert type(back).__name__ == type(error).__name__
    assert str(back) == text
    if isinstance(error, PolyturnError) and type(error) is not Quota:
        assert type(back) is type(error)


@FEW
@given(JSON | st.fixed_dictionaries({"type": JSON | st.just("KeyError"), "ours": JSON, "text": JSON}))
def test_an_error_that_is_none_is_the_processs_own(document):
    error = to_error(document, "environment-1")
    assert type(error) is ResourceError or type(error).__name__ == document["type"]
    assert "environment-1" in str(error)


def test_an_exception_of_somebody_elses_tree_with_our_name_is_not_ours():
    error = type("ResourceError", (Exception,), {})("x")
    back = to_error(from_error(error), "environment-1")
    assert not isinstance(back, PolyturnError)
    assert type(back).__name__ == "ResourceError"
