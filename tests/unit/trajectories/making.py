"""Trajectories and samples made at random, for the property tests of this room."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from polyturn.types import Message, Task, TrainSample, Trajectory, Turn

TASK = Task(id="talk/0", environment="talk", messages=(Message(role="user", content="find"),))


@st.composite
def turns(draw, *, first=False):
    completion = draw(st.lists(st.integers(100, 199), min_size=1, max_size=4))
    n = len(completion)
    return Turn(
        prompt_ids=tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))),
        completion_ids=tuple(completion),
        engine_logprobs=tuple(draw(st.lists(st.floats(-20, 0, width=32), min_size=n, max_size=n))),
        policy_versions=tuple(draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))),
        stop_reason="stop",
        continues=not first and draw(st.booleans()),
        text="",
    )


@st.composite
def trajectories(draw, *, most=4):
    rest = draw(st.lists(turns(), max_size=most - 1))
    return Trajectory(task=TASK, sibling=draw(st.integers(0, 7)), turns=(draw(turns(first=True)), *rest), end_reason="done")


def sample(length, *, name="talk/0/0", temperature=1.0, start=0) -> TrainSample:
    """A sample whose arrays tell where each of its tokens comes from."""
    places = np.arange(start, start + length)
    mask = places % 3 != 0
    mask[0] = False
    mask[-1] = True
    return TrainSample(
        trajectory_id=name,
        group_id=name.rpartition("/")[0],
        temperature=temperature,
        input_ids=places.astype(np.int64),
        loss_mask=mask,
        advantages=(places * mask / 8).astype(np.float32),
        engine_logprobs=(-places * mask / 16).astype(np.float32),
        turn_index=np.where(mask, places % 5, -1).astype(np.int64),
        policy_version=np.where(mask, places % 7, -1).astype(np.int64),
    )
