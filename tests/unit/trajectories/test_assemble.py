"""Turns into samples: what was read and said in order, and everything known about each sampled token at its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.errors import SampleError
from polyturn.trajectories.assemble import assemble
from polyturn.types import Trajectory, Turn
from unit.trajectories.making import TASK, trajectories


def turn(prompt, completion, **changes) -> Turn:
    n = len(completion)
    made = Turn(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        engine_logprobs=tuple(-0.5 - index for index in range(n)),
        policy_versions=(3,) * n,
        stop_reason="stop",
        continues=True,
        text="",
    )
    return replace(made, **changes)


def trajectory(*turns_of: Turn) -> Trajectory:
    return Trajectory(task=TASK, sibling=2, turns=turns_of, end_reason="done", outcome_reward=1.0)


def test_the_example_of_the_types():
    played = trajectory(turn((1, 5, 6), (7, 2), continues=False), turn((3, 9), (8, 2), policy_versions=(3, 4)))
    (sample,) = assemble(played, [0.5, -1.0], temperature=0.7)
    assert sample.trajectory_id == "talk/0/2"
    assert sample.group_id == "talk/0"
    assert sample.temperature == 0.7
    assert sample.input_ids.tolist() == [1, 5, 6, 7, 2, 3, 9, 8, 2]
    assert sample.loss_mask.tolist() == [False, False, False, True, True, False, False, True, True]
    assert sample.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, -1, -1]
    assert sample.engine_logprobs.tolist() == [0, 0, 0, -0.5, -1.5, 0, 0, -0.5, -1.5]
    assert sample.turn_index.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1, 1]
    assert sample.policy_version.tolist() == [-1, -1, -1, 3, 3, -1, -1, 3, 4]
    types = {name: getattr(sample, name).dtype for name in ("input_ids", "loss_mask", "advantages", "engine_logprobs")}
    assert types == {"input_ids": np.int64, "loss_mask": np.bool_, "advantages": np.float32, "engine_logprobs": np.float32}


def test_a_rewritten_history_starts_a_new_sample():
    played = trajectory(
        turn((1, 5), (7, 2), continues=False),
        turn((1, 6), (8, 2), continues=False),
        turn((9,), (4, 2)),
        turn((1,), (2,), continues=False),
    )
    samples = assemble(played, [0.0, 1.0, 2.0, 3.0], temperature=1.0)
    assert [sample.input_ids.tolist() for sample in samples] == [[1, 5, 7, 2], [1, 6, 8, 2, 9, 4, 2], [1, 2]]
    assert [sample.turn_index.max() for sample in samples] == [0, 2, 3]
    assert samples[1].advantages.tolist() == [0, 0, 1, 1, 0, 2, 2]
    assert {sample.trajectory_id for sample in samples} == {"talk/0/2"}


@given(trajectories(), st.data())
def test_nothing_is_lost_and_nothing_is_moved(played, data):
    k = len(played.turns)
    advantages = data.draw(st.lists(st.floats(-4, 4, width=32), min_size=k, max_size=k))
    samples = assemble(played, advantages, temperature=1.0)
    assert len(samples) == sum(turn_of.continues is False for turn_of in played.turns)
    contexts: list[list[int]] = []
    for turn_of in played.turns:
        if not turn_of.continues:
            contexts.append([])
        contexts[-1] += [*turn_of.prompt_ids, *turn_of.completion_ids]
    assert [sample.input_ids.tolist() for sample in samples] == contexts
    # Sampled ids are 100 and more here, others less.
    assert all((sample.loss_mask == (sample.input_ids >= 100)).all() for sample in samples)

    def trained(name):
        return [value for sample in samples for value in getattr(sample, name)[sample.loss_mask].tolist()]

    assert trained("input_ids") == [token for t in played.turns for token in t.completion_ids]
    assert trained("engine_logprobs") == [value for t in played.turns for value in t.engine_logprobs]
    assert trained("policy_version") == [value for t in played.turns for value in t.policy_versions]
    assert trained("turn_index") == [index for index, t in enumerate(played.turns) for _ in t.completion_ids]
    assert trained("advantages") == [advantages[index] for index, t in enumerate(played.turns) for _ in t.completion_ids]
    for sample in samples:
        read = ~sample.loss_mask
        assert not sample.advantages[read].any()
        assert not sample.engine_logprobs[read].any()
        assert (sample.turn_index[read] == -1).all()
        assert (sample.policy_version[read] == -1).all()


def test_a_first_turn_that_says_it_continues_has_nothing_to_continue():
    (sample,) = assemble(trajectory(turn((1, 5), (7, 2), continues=True)), [1.0], temperature=1.0)
    assert sample.input_ids.tolist() == [1, 5, 7, 2]


@pytest.mark.parametrize("advantages", [[], [1.0], [1.0] * 3])
def test_advantages_of_other_turns(advantages):
    played = trajectory(turn((1,), (7, 2), continues=False), turn((3,), (8, 2)))
    with pytest.raises(SampleError, match=rf"talk/0/2: {len(advantages)} advantages for 2 turns"):
        assemble(played, advantages, temperature=1.0)


BAD_TURNS = [
    ({"engine_logprobs": (-0.5,)}, "turn 1 has 2 sampled ids, 1 log-probabilities and 2 policy versions"),
    ({"policy_versions": (3, 3, 3)}, "turn 1 has 2 sampled ids, 2 log-probabilities and 3 policy versions"),
    ({"engine_logprobs": (-0.5, float("nan"))}, "engine_logprobs has nan or inf"),
    ({"engine_logprobs": (float("-inf"), -0.5)}, "engine_logprobs has nan or inf"),
    ({"continues": False, "completion_ids": (), "engine_logprobs": (), "policy_versions": ()}, "no token to train"),
    ({"continues": False, "prompt_ids": ()}, "the first token is trained"),
]


@pytest.mark.parametrize(("changes", "said"), BAD_TURNS)
def test_a_broken_turn_makes_no_sample(changes, said):
    played = trajectory(turn((1,), (7, 2), continues=False), turn((3,), (8, 2), **changes))
    with pytest.raises(SampleError) as caught:
        assemble(played, [1.0, 1.0], temperature=1.0)
    assert str(caught.value).startswith("talk/0/2")
    assert said in str(caught.value)


def test_an_advantage_that_is_no_number():
    with pytest.raises(SampleError, match="advantages has nan or inf"):
        assemble(trajectory(turn((1,), (7, 2), continues=False)), [float("nan")], temperature=1.0)
