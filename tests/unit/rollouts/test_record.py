"""Trajectories as JSON lines: whatever was played is read back, and what can't be read is named with its line."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.errors import DataError
from polyturn.rollouts.record import from_json, read_trajectories, to_json, write_trajectories
from polyturn.types import Message, Task, Trajectory, Turn
from semantics.scenes import lookup, play_group, player, says

texts = st.text(max_size=8)
any_text = st.one_of(texts, st.text(st.sampled_from("ab\udc80\udcff\n"), max_size=4))
"""With halves of surrogate pairs, as Python reads bytes that are no text."""
numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)
ids = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
messages = st.builds(Message, role=st.sampled_from(["system", "user", "assistant", "tool"]), content=any_text)
info = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts, lambda inner: st.lists(inner, max_size=2), max_leaves=3
)
tasks = st.builds(
    Task,
    id=texts,
    environment=texts,
    messages=st.lists(messages, max_size=2).map(tuple),
    answer=st.none() | any_text,
    info=st.dictionaries(texts, info, max_size=2),
)


@st.composite
def turns(draw):
    completion = draw(ids)
    n = len(completion)
    return Turn(
        prompt_ids=draw(ids),
        completion_ids=completion,
        engine_logprobs=tuple(draw(st.lists(numbers, min_size=n, max_size=n))),
        policy_versions=tuple(draw(st.lists(st.integers(0, 99), min_size=n, max_size=n))),
        stop_reason=draw(st.sampled_from(["stop", "length"])),
        continues=draw(st.booleans()),
        text=draw(any_text),
        reply=tuple(draw(st.lists(messages, max_size=2))),
        reward=draw(numbers),
        state_key=draw(st.none() | any_text),
        counts=draw(st.dictionaries(texts, numbers, max_size=2)),
    )


trajectories = st.builds(
    Trajectory,
    task=tasks,
    sibling=st.integers(0, 99),
    turns=st.lists(turns(), max_size=3).map(tuple),
    end_reason=st.sampled_from(["done", "max_turns", "max_tokens", "fault"]),
    outcome=st.dictionaries(texts, st.none() | numbers, max_size=2),
    outcome_reward=st.none() | numbers,
    success=st.booleans(),
    fault=st.none() | any_text,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@given(st.lists(trajectories, max_size=3))
def test_whatever_is_written_is_read_back(folder, played):
    path = folder / "deep" / "step.jsonl"
    write_trajectories(path, map(to_json, played))
    assert list(read_trajectories(path)) == played
    assert [found.name for found in path.parent.iterdir()] == ["step.jsonl"]


@given(trajectories)
def test_a_line_is_json_that_any_reader_takes(trajectory):
    def refuse(name):
        raise AssertionError(name)

    text = json.dumps(to_json(trajectory), allow_nan=False)
    assert from_json(json.loads(text, parse_constant=refuse)) == trajectory


async def test_a_played_group_is_read_back(tmp_path):
    environment, renderer = lookup(dead_end_share=0.0)
    task = environment.tasks("train", 0)[1]
    group = await play_group(player(environment, says(renderer, "lookup(", *environment.gold(task)), renderer), task, size=3)
    path = tmp_path / "step.jsonl"
    write_trajectories(path, map(to_json, group.trajectories))
    assert tuple(read_trajectories(path)) == group.trajectories


def one_turn(**changes) -> Turn:
    turn = Turn(
        prompt_ids=(1, 5, 6),
        completion_ids=(7, 2),
        engine_logprobs=(-0.5, -0.25),
        policy_versions=(3, 4),
        stop_reason="stop",
        continues=False,
        text="look",
    )
    return replace(turn, **changes)


def one_trajectory(*turns_of, **changes) -> Trajectory:
    task = Task(id="talk/0", environment="talk", messages=(Message(role="user", content="find"),))
    return replace(Trajectory(task=task, sibling=1, turns=turns_of or (one_turn(),), end_reason="done"), **changes)


def test_what_a_line_says():
    row = to_json(one_trajectory(one_turn(), one_turn(continues=True)), np.array([0.5, -1.0]))
    assert [turn["loss_mask"] for turn in row["turns"]] == [[0, 0, 0, 1, 1]] * 2
    assert [turn["advantage"] for turn in row["turns"]] == [0.5, -1.0]
    assert [turn["advantage"] for turn in to_json(one_trajectory())["turns"]] == [None]
    assert row["format"] == 1
    assert row["task"]["messages"] == [{"role": "user", "content": "find"}]


def test_numbers_that_are_none_do_not_end_a_run(tmp_path):
    """A sample with them is dropped and counted later; its record must not be what kills the run."""
    path = tmp_path / "step.jsonl"
    bad = one_trajectory(one_turn(engine_logprobs=(-0.5, -math.inf)), one_turn(engine_logprobs=(math.nan, -1.0)))
    write_trajectories(path, [to_json(bad), to_json(one_trajectory())])
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()
    first, second = read_trajectories(path)
    assert first.turns[0].engine_logprobs == (-0.5, pytest.approx(math.nan, nan_ok=True))
    assert math.isnan(first.turns[1].engine_logprobs[0])
    assert second == one_trajectory()


def test_info_of_an_author_that_is_no_json_does_not_end_a_run(tmp_path):
    path = tmp_path / "step.jsonl"
    info = {"tags": {"a"}, "size": np.int64(3), "share": np.float32(0.5), "row": np.arange(2), "limit": math.inf}
    trajectory = one_trajectory()
    write_trajectories(path, [to_json(replace(trajectory, task=replace(trajectory.task, info=info)))])
    (read,) = read_trajectories(path)
    assert read.task.info == {"tags": "{'a'}", "size": 3, "share": 0.5, "row": [0, 1], "limit": None}


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "step.jsonl"
    write_trajectories(path, [to_json(one_trajectory())])
    before = path.read_bytes()

    def rows():
        yield to_json(one_trajectory(sibling=7))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trajectories(path, rows())
    assert path.read_bytes() == before


def line(**changes) -> bytes:
    return json.dumps({**to_json(one_trajectory()), **changes}).encode()


GOOD_LINE = line()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"{", "not a recorded trajectory (JSONDecodeError"),
        (b"", "not a recorded trajectory (JSONDecodeError"),
        (b"[]", "not a recorded trajectory"),
        (b"3", "not a recorded trajectory"),
        (b"\xff", "not a recorded trajectory (UnicodeDecodeError"),
        (line(format=2), "trajectory format 2 is not 1, the one this version reads"),
        (b"{}", "trajectory format None is not 1"),
        (json.dumps({"format": 1}).encode(), "not a recorded trajectory (KeyError: 'task')"),
        (line(turns=[{"continues": True}]), "not a recorded trajectory (KeyError"),
        (line(turns=None), "not a recorded trajectory (TypeError"),
        (line(task={"id": "a"}), "not a recorded trajectory (KeyError"),
        (
            line(turns=[{**to_json(one_trajectory())["turns"][0], "reply": [{"text": "a"}]}]),
            "not a recorded trajectory (TypeError",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, said):
    path = tmp_path / "step.jsonl"
    path.write_bytes(GOOD_LINE + b"\n" + bad + b"\n" + GOOD_LINE + b"\n")
    rows = read_trajectories(path)
    assert next(rows) == one_trajectory()
    with pytest.raises(DataError) as caught:
        next(rows)
    assert str(caught.value).startswith(f"{path}:2: {said}")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        list(read_trajectories(tmp_path / "step.jsonl"))
