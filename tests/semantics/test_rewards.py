"""Rewards of a recipe through whole episodes: what fails is masked and counted, what the model does is scored.

Each test plays a group of siblings with `rollouts.driver`, and looks at what the trainer would see.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from polyturn.environments.rewarded import Rewarded
from polyturn.environments.rewards.base import Reward
from polyturn.environments.rewards.code import TestsPassed
from polyturn.environments.rewards.judge import LlmJudge
from polyturn.errors import ResourceError
from polyturn.programs import Verdict
from polyturn.types import Task
from semantics.scenes import FOREVER, Talk, play_group, player, says, talk_renderer, talk_task

UNLUCKY = 3


class Unlucky:
    """A reward that does `act` for one of the siblings, and gives 0.5 to the others."""

    def __init__(self, act):
        self.act = act
        self.calls = 0

    async def __call__(self, view, task):
        number, self.calls = self.calls, self.calls + 1
        if number == UNLUCKY:
            result = self.act()
            return await result if asyncio.iscoroutine(result) else result
        return 0.5


def fails(error):
    def act():
        raise error

    return act


def group_of(reward, *, environment=None, concurrency=1, **options):
    """Eight siblings that say `answer(red)`, usually one after the other, scored by the environment (1) and by `reward`."""
    renderer = talk_renderer()
    scored = Rewarded(environment or Talk(), [reward])
    return play_group(player(scored, says(renderer, "answer(red)"), renderer, **options), concurrency=concurrency)


def faults(group):
    return [(trajectory.sibling, trajectory.fault) for trajectory in group.trajectories if trajectory.fault is not None]


FAILURES = {
    "an exception": (fails(ValueError("bad json")), "the reward extra raised ValueError: bad json"),
    "a lost resource": (fails(ResourceError("the judge is gone")), "the judge is gone"),
    "a timeout of its own": (fails(TimeoutError("no answer")), "the reward extra raised TimeoutError: no answer"),
    "leaving the process": (fails(SystemExit(3)), "talk.rewards raised SystemExit: 3"),
    "a text": (lambda: "good", "the reward extra returned 'good', where it must return a finite number"),
    "not a number": (lambda: float("nan"), "the reward extra returned nan"),
    "never": (lambda: asyncio.sleep(FOREVER), "which is its deadline, and it did not come"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_reward_that_fails_masks_its_trajectory_and_is_never_a_0(name):
    act, said = FAILURES[name]
    # Long enough for those that do answer, on a busy machine too.
    group = await group_of(Reward(name="extra", function=Unlucky(act), deadline_s=1.0 if name == "never" else None))
    (((sibling, reason)),) = faults(group)
    assert sibling == UNLUCKY
    assert said in reason
    lost = group.trajectories[UNLUCKY]
    assert (lost.outcome, lost.outcome_reward, lost.success, lost.valid) == ({}, None, False, False)
    assert len(lost.turns) == 1, "its tokens stay in the record"
    assert len(group.valid) == 7
    assert all(trajectory.outcome_reward == 1.5 for trajectory in group.valid)


async def test_a_reward_of_turns_that_fails_is_a_fault_as_well():
    group = await group_of(Reward(name="extra", function=Unlucky(fails(KeyError("x"))), scope="turn"))
    assert faults(group) == [(UNLUCKY, "the reward extra raised KeyError: 'x'")]
    assert all(trajectory.turn_rewards == (0.75,) for trajectory in group.valid)


async def test_the_environments_deadline_holds_for_a_reward_without_one():
    reward = Reward(name="extra", function=Unlucky(lambda: asyncio.sleep(FOREVER)))
    group = await group_of(reward, tool_deadline_s=2.0)  # long enough for those that do answer, on a busy machine too
    assert [sibling for sibling, _ in faults(group)] == [UNLUCKY]
    assert "talk.rewards" in faults(group)[0][1]


async def test_a_blocking_reward_holds_up_no_sibling():
    all_there = threading.Barrier(8)

    def block(view, task):
        all_there.wait(30)  # passes when all eight siblings are inside at once
        return 1.0

    group = await group_of(Reward(name="extra", function=block), concurrency=8)
    assert len(group.valid) == 8


async def test_none_is_a_component_that_is_not_there():
    group = await group_of(Reward(name="extra", function=Unlucky(lambda: None)))
    assert faults(group) == []
    assert group.trajectories[UNLUCKY].outcome == {"answer": 1.0, "extra": None}
    assert group.trajectories[UNLUCKY].outcome_reward == 1.0


async def test_weights_of_a_reward_hold_for_its_parts():
    renderer = talk_renderer()
    reward = Reward(name="extra", function=lambda view, task: {"a": 1.0, "b": 2.0})
    chosen = player(
        Rewarded(Talk(), [reward]), says(renderer, "answer(red)"), renderer, reward_weights={"extra": 0.5, "extra/b": 0.25}
    )
    group = await play_group(chosen)
    assert {trajectory.outcome_reward for trajectory in group.valid} == {1.0 + 0.5 * 1.0 + 0.25 * 2.0}
    assert all(trajectory.success for trajectory in group.valid)


async def test_a_penalty_does_not_undo_success_and_a_bonus_does_not_make_it():
    penalty = await group_of(Reward(name="extra", function=lambda view, task: -5.0))
    assert all(trajectory.success for trajectory in penalty.valid)
    renderer = talk_renderer()
    bonus = Rewarded(Talk(), [Reward(name="extra", function=lambda view, task: 5.0)])
    group = await play_group(player(bonus, says(renderer, "answer(blue)"), renderer))
    assert not any(trajectory.success for trajectory in group.valid)
    assert {trajectory.outcome_reward for trajectory in group.valid} == {5.0}


async def test_rewards_see_the_sampled_tokens_of_each_turn():
    seen = []
    renderer = talk_renderer()
    scored = Rewarded(Talk(), [Reward(name="extra", function=lambda view, task: seen.append(view) or 0.0)])
    await play_group(player(scored, says(renderer, "look(red)", "answer(red)"), renderer), size=2)
    view = seen[0]
    assert [turn.text for turn in view.turns] == ["look(red)", "answer(red)"]
    assert [turn.num_tokens for turn in view.turns] == [5, 5], "the words, the marks and the stop token"
    assert view.turns[0].results == ("blue",)


class Runner:
    """A sandbox that breaks for one sibling and ends the program of another at its time limit."""

    def __init__(self):
        self.calls = 0

    async def run_tests(self, code, tests, entry_points=None):
        number, self.calls = self.calls, self.calls + 1
        if number == UNLUCKY:
            raise ResourceError("the sandbox pool is gone")
        limit = number == UNLUCKY + 1
        return Verdict(loaded=True, passed=(not limit,) * len(tests), reason="timeout" if limit else None)


async def test_a_limit_of_the_program_is_scored_and_a_fault_of_the_sandbox_is_not():
    task = talk_task()
    task = Task(id=task.id, environment=task.environment, messages=task.messages, answer="red", info={"tests": ["assert 1"]})
    renderer = talk_renderer()
    reward = Reward(name="tests", function=TestsPassed(runner=Runner()))
    group = await play_group(player(Rewarded(Talk(), [reward]), says(renderer, "answer(red)"), renderer), task)
    assert [reason for _, reason in faults(group)] == ["the sandbox pool is gone"]
    assert sorted(trajectory.outcome["tests"] for trajectory in group.valid) == [0.0] + [1.0] * 6


async def test_a_judge_out_of_reach_masks_every_trajectory():
    judge = LlmJudge(url="http://127.0.0.1:9/v1", model="m", retries=0, timeout_s=1.0)
    group = await group_of(Reward(name="judge", function=judge))
    assert group.valid == ()
    assert all("http://127.0.0.1:9/v1/chat/completions failed 1 times" in reason for _, reason in faults(group))
