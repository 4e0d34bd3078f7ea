"""Rewards by name and dotted path, and what one answer of them becomes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from polyturn.config.schema import RewardEntry
from polyturn.environments.resources import Resources
from polyturn.environments.rewards.base import Reward
from polyturn.environments.rewards.length import LengthPenalty
from polyturn.environments.rewards.registry import BUILTIN, build_rewards
from polyturn.errors import ConfigError, DeadlineError, EnvironmentSetupError
from unit.environments.rewards.scenes import said

HERE = "unit.environments.rewards.test_registry"


def words(trajectory, task):
    return len(trajectory.text.split())


async def later(trajectory, task):
    await asyncio.sleep(0)
    return {"right": float(trajectory.text == task.answer), "short": None}


def scaled(trajectory, task, *, scale, offset=0.0):
    return scale * len(trajectory.text) + offset


class Remembers:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    async def __call__(self, trajectory, task):
        self.count += 1
        return self.count


class Silent:
    pass


def one_argument(trajectory):
    return 0


constant = 5


def entry(path, **more):
    return RewardEntry(path=path if path in BUILTIN or ":" in path else f"{HERE}:{path}", **more)


def build(path, **more):
    resources = more.pop("resources", None)
    (reward,) = build_rewards([entry(path, **more)], resources)
    return reward


def of(function, **more):
    return Reward(name="mine", function=function, **more)


async def test_functions_classes_and_arguments():
    assert await build("words")(said("a b")) == {"words": 2.0}
    assert await build("later")(said("Lima")) == {"later/right": 1.0, "later/short": None}
    assert await build("scaled", args={"scale": 2}, name="size")(said("abc")) == {"size": 6.0}
    remembers = build("Remembers", args={"start": 3})
    assert [await remembers(said("x")) for _ in range(2)] == [{"Remembers": 4.0}, {"Remembers": 5.0}]


def test_built_ins_have_their_own_names():
    assert {"exact_match", "f1", "soft_format", "tests_passed", "llm_judge"} <= set(BUILTIN)
    reward = build("length_penalty", args={"free": 1, "limit": 2}, weight=0.5, per="turn", deadline_s=2.0, success_at=0.0)
    assert reward == Reward(
        name="length_penalty",
        function=LengthPenalty(free=1, limit=2),
        weight=0.5,
        scope="turn",
        deadline_s=2.0,
        success_at=0.0,
    )
    assert build("soft_format", args={"tags": ["a", "b"]}).function.tags == ("a", "b"), "lists of a recipe are tuples"


@pytest.mark.parametrize(
    ("path", "more", "error", "said_of_it"),
    [
        ("exact_mach", {}, EnvironmentSetupError, "'exact_mach' is no built-in reward; did you mean exact_match"),
        (f"{HERE}:wrods", {}, ConfigError, "did you mean words"),
        (f"{HERE}:constant", {}, EnvironmentSetupError, "can't be called"),
        (f"{HERE}:Silent", {}, EnvironmentSetupError, "has no __call__"),
        (f"{HERE}:one_argument", {}, EnvironmentSetupError, "must take two arguments"),
        (f"{HERE}:scaled", {}, EnvironmentSetupError, r"needs args\.scale"),
        (f"{HERE}:scaled", {"args": {"scal": 1}}, EnvironmentSetupError, "scal is no argument of .*; did you mean scale"),
        (f"{HERE}:words", {"args": {"a": 1}}, EnvironmentSetupError, "a is no argument of .*; it takes none"),
        ("length_penalty", {"args": {"free": 3}}, EnvironmentSetupError, r"needs args\.limit"),
        ("length_penalty", {"args": {"free": 3, "limit": 1}}, EnvironmentSetupError, "less than limit"),
        ("length_penalty", {"args": {"free": "a", "limit": 1}}, EnvironmentSetupError, "could not be built: TypeError"),
        ("tests_passed", {}, EnvironmentSetupError, "runs code and there is no sandbox"),
        ("llm_judge", {"args": {"url": "x", "model": "m"}}, EnvironmentSetupError, "is no base of an API"),
    ],
)
def test_rewards_that_can_not_be_built(path, more, error, said_of_it):
    with pytest.raises(error, match=said_of_it):
        build_rewards([RewardEntry(path=path, **more)])


def test_two_of_one_name():
    with pytest.raises(EnvironmentSetupError, match="two rewards are called 'words'"):
        build_rewards([entry("words"), entry("words")])
    assert [reward.name for reward in build_rewards([entry("words"), entry("words", name="again")])] == ["words", "again"]


def test_a_sandbox_is_handed_to_those_that_ask():
    runner = object()
    assert build("tests_passed", args={"power": 2.0}, resources=Resources(runner=runner)).function.runner is runner


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (1, {"mine": 1.0}),
        (True, {"mine": 1.0}),
        (np.float32(0.5), {"mine": 0.5}),
        (None, {"mine": None}),
        ({}, {}),
        ({"a": 1, "b": None}, {"mine/a": 1.0, "mine/b": None}),
    ],
)
async def test_what_an_answer_becomes(value, outcome):
    assert await of(lambda trajectory, task: value)(said("x")) == outcome


@pytest.mark.parametrize("value", ["1", b"1", float("nan"), float("inf"), [1], object(), {"a": "x"}, 1j])
async def test_what_is_no_score_is_a_fault_and_not_a_0(value):
    with pytest.raises(EnvironmentSetupError, match=r"the reward mine returned .*, where it must return a finite number"):
        await of(lambda trajectory, task: value)(said("x"))


async def test_what_raises_is_a_fault_with_its_name():
    def broken(trajectory, task):
        return 1 / 0

    with pytest.raises(EnvironmentSetupError, match="the reward mine raised ZeroDivisionError: division by zero"):
        await of(broken)(said("x"))


async def test_a_reward_has_a_deadline_of_its_own():
    async def slow(trajectory, task):
        await asyncio.sleep(60)

    with pytest.raises(DeadlineError, match="the reward mine of a:1"):
        await of(slow, deadline_s=0.02)(said("x"))


def test_which_components_are_its_own():
    reward = of(words)
    assert reward.owns("mine")
    assert reward.owns("mine/a")
    assert not reward.owns("minester")
