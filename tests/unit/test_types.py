"""The nouns: what a sample refuses, and what a trajectory says about itself."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.errors import SampleError
from polyturn.types import Message, TrainSample, Trajectory, TrajectoryGroup, Turn
from unit.trajectories.making import TASK, sample

ARRAYS = ("input_ids", "loss_mask", "advantages", "engine_logprobs", "turn_index", "policy_version")


def changed(**arrays) -> TrainSample:
    return replace(sample(6), **arrays)


@given(st.sampled_from(ARRAYS), st.integers(-2, 2).filter(bool))
def test_arrays_of_different_lengths_are_refused(name, change):
    array = getattr(sample(6), name)
    other = array[:change] if change < 0 else np.concatenate([array, array[:change]])
    with pytest.raises(SampleError, match=f"talk/0/0: arrays of one sample differ in length: .*'{name}': {6 + change}"):
        changed(**{name: other})


def test_a_sample_without_a_trained_token_is_refused():
    with pytest.raises(SampleError, match="talk/0/0: no token to train"):
        changed(loss_mask=np.zeros(6, dtype=np.bool_))


def test_a_trained_first_token_is_refused():
    with pytest.raises(SampleError, match="the first token is trained, but nothing predicts it"):
        changed(loss_mask=np.ones(6, dtype=np.bool_))


@pytest.mark.parametrize("name", ["advantages", "engine_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused_where_they_are_trained(name, value):
    whole = sample(6)
    for place in range(6):
        array = getattr(whole, name).copy()
        array[place] = value
        if whole.loss_mask[place]:
            with pytest.raises(SampleError, match=f"talk/0/0: {name} has nan or inf on a trained token"):
                changed(**{name: array})
        else:
            assert len(changed(**{name: array})) == 6


def test_nouns_are_frozen():
    with pytest.raises(FrozenInstanceError):
        sample(6).temperature = 2.0
    with pytest.raises(FrozenInstanceError):
        TASK.answer = "red"


def turn(reward=0.0, tokens=2) -> Turn:
    return Turn(
        prompt_ids=(1,),
        completion_ids=(7,) * tokens,
        engine_logprobs=(-1.0,) * tokens,
        policy_versions=(0,) * tokens,
        stop_reason="stop",
        continues=False,
        text="",
        reward=reward,
    )


def trajectory(**changes) -> Trajectory:
    made = Trajectory(
        task=TASK, sibling=3, turns=(turn(0.25), turn(0.5, tokens=3)), end_reason="done", outcome_reward=1.0, outcome={"a": 1.0}
    )
    return replace(made, **changes)


def test_what_a_trajectory_says_about_itself():
    made = trajectory()
    assert made.id == "talk/0/3"
    assert made.turn_rewards == (0.25, 0.5)
    assert made.total_reward == 1.75
    assert made.num_completion_tokens == 5
    assert math.isnan(trajectory(outcome_reward=None).total_reward)


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({}, True),
        ({"outcome_reward": 0.0}, True),
        ({"end_reason": "max_turns"}, True),
        ({"end_reason": "max_tokens"}, True),
        ({"fault": "gone", "end_reason": "fault"}, False),
        ({"outcome_reward": None}, False),
        ({"turns": ()}, False),
    ],
)
def test_who_may_be_compared(changes, valid):
    made = trajectory(**changes)
    assert made.valid == valid
    assert made.truncated == made.end_reason.startswith("max")
    other = trajectory(sibling=4)
    assert TrajectoryGroup(task=TASK, trajectories=(made, other)).valid == ((made, other) if valid else (other,))


def test_messages_are_compared_by_what_they_say():
    assert Message(role="user", content="find") == TASK.messages[0]
    assert Message(role="tool", content="find") != TASK.messages[0]
