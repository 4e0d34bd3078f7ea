"""Played in other processes a trajectory is the same as here, bit for bit, and so is a fault, which adds where it happened.

1. The same replies give the same trajectories, whatever process played which.
2. A fault reads the same: an exception, one that is no Exception, a return that is none, an error of our own tree.
3. A deadline of the driver cuts what is played elsewhere.
4. A process that is gone is a fault of its trajectories only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import sys

import pytest

from parts.environment_processes import TOKEN, connected, processes, remote, served, until
from polyturn.engine.scripted import ScriptedEngine
from polyturn.environments.base import StepResult
from polyturn.environments.builtin.lookup import NAMES, VALUES, Lookup
from polyturn.environments.mixed import Mixed
from polyturn.environments.remote import RemoteEnvironment
from polyturn.environments.rewarded import Rewarded
from polyturn.environments.rewards.base import Reward
from polyturn.errors import DataError, DeadlineError, EngineError, EnvironmentSetupError, SandboxError, TrainingError
from polyturn.rollouts.driver import rollout_groups
from polyturn.types import Message, Trajectory, TrajectoryGroup
from semantics.scenes import (
    FOREVER,
    GROUP_SIZE,
    SHORT_S,
    BlockingTalk,
    Talk,
    lookup,
    play_group,
    player,
    reply_ids,
    says,
    talk_renderer,
)

WHERE = r" ?\(in environment-0\)"


def without_place(group: TrajectoryGroup) -> list[Trajectory]:
    """The trajectories with faults that don't say where; an exception without a text ends in a space otherwise."""
    return [
        dataclasses.replace(one, fault=None if one.fault is None else re.sub(WHERE, "", one.fault).rstrip())
        for one in group.trajectories
    ]


# ── trajectories ───────────────────────────────────────────────────────────────────────────────────────────────────────


def follows(renderer):
    """An engine that follows the last name it has read, and now and then says something else."""

    def script(context):
        words = [
            word.strip("(),<|>") for word in renderer.tokenizer.decode(context).replace("(", " ").replace(",", " ").split()
        ]
        known = [word for word in "".join(f" {word}" for word in words).replace(")", " ").split() if word in (*NAMES, *VALUES)]
        last = known[-1] if known else NAMES[0]
        said = f"answer({last})" if last in VALUES else f"lookup({last})"
        return reply_ids(renderer, {0: "lookup(", 1: f"answer({VALUES[0]})"}.get(sum(context) % 7, said))

    return ScriptedEngine(script)


async def lookup_groups(environment, renderer, tasks):
    chosen = player(environment, follows(renderer), renderer, max_turns=6)
    return await rollout_groups(chosen, tasks, group_size=4, concurrency=16)


async def test_1_the_same_trajectories_through_two_processes(tmp_path):
    environment, renderer = lookup(max_hops=3)
    source = environment.tasks("train", 7)
    tasks = [source[index] for index in range(12)]
    here = await lookup_groups(environment, renderer, tasks)
    with processes(tmp_path, "lookup", loop_limits_s=(60.0, 60.0)) as (first, second):
        async with connected(RemoteEnvironment(environment, [first.url, second.url], token=TOKEN)) as elsewhere:
            there = await lookup_groups(elsewhere, renderer, tasks)
    assert there == here
    lengths = {len(one.turns) for group in here for one in group.trajectories}
    rewards = {one.total_reward for group in here for one in group.trajectories}
    assert len(lengths) > 2, "or this would show little"
    assert len(rewards) > 2, "or this would show little"


@pytest.mark.real
async def test_1_the_same_trajectories_of_a_model(tmp_path):
    from parts.models import tiny_model
    from polyturn.engine.hf import HfEngine

    environment, renderer = lookup(max_hops=3)
    source = environment.tasks("train", 7)
    tasks = [source[index] for index in range(4)]
    model = tiny_model(vocab_size=renderer.tokenizer.vocab_size)

    async def groups(played):
        engine = HfEngine(model)
        await engine.start()
        try:
            chosen = player(played, engine, renderer, max_turns=3)
            return await rollout_groups(chosen, tasks, group_size=4, concurrency=16, deterministic=True)
        finally:
            await engine.stop()

    here = await groups(environment)
    with processes(tmp_path, "lookup", loop_limits_s=(60.0, 60.0)) as (first, second):
        async with connected(RemoteEnvironment(environment, [first.url, second.url], token=TOKEN)) as elsewhere:
            assert await groups(elsewhere) == here


async def test_1_rewards_of_the_recipe_and_mixes_are_played_there():
    def rewarded():
        environment, _ = lookup()
        turns = Reward(name="length", function=lambda view, task: len(view.text) / 3, weight=0.1, scope="turn")
        return Rewarded(environment, [turns, Reward(name="long", function=lambda view, task: len(view.turns) / 7)])

    def mixed():
        return Mixed({"lookup": rewarded(), "talk": Talk()})

    renderer = lookup()[1]
    source = Lookup(instructions=False).tasks("train", 3)
    tasks = [source[index] for index in range(4)]
    for build in (rewarded, mixed):
        here = await lookup_groups(build(), renderer, tasks)
        with served(build()) as first, served(build(), name="environment-1") as second:
            async with connected(remote(build(), first, second)) as environment:
                assert await lookup_groups(environment, renderer, tasks) == here
        assert {"length", "long"} & {name.partition("/")[2] or name for t in here[0].trajectories for name in t.outcome}


# ── faults ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Timeout(BaseException):
    """As the libraries that stop a function from another thread raise it."""


class Quota(EnvironmentSetupError):
    """An author's own error of one of our kinds."""


def raising(error):
    def act(*arguments):
        raise error

    return act


ERRORS = [
    RuntimeError("the pool is empty"),
    KeyError("score"),
    OSError(2, "no such file"),
    ValueError(),
    SystemExit(3),
    Timeout("3 s"),
    StopAsyncIteration("enough"),
    EnvironmentSetupError("the row is wrong"),
    SandboxError("the pool died"),
    DeadlineError("waited 3 s for the judge, which is its deadline, and it did not come"),
    EngineError("not ours"),
    DataError("no answer"),
    TrainingError("stop"),
    Quota("used up"),
]
RETURNS = {
    "step": [
        None,
        "blue",
        StepResult(reward=math.nan, done=True),
        StepResult(reward="1", done=True),
        StepResult(messages=("blue",)),
        StepResult(messages=(Message(role="tool", content=None),)),
        StepResult(messages=(Message(role="tool", content="purple"),)),
        StepResult(done=True, counts={"malformed": "one"}),
        StepResult(done=True, state_key=7),
    ],
    "rewards": [None, {"answer": math.nan}, {"answer": -math.inf}, {"answer": "1"}, {"answer": None}, 1.0],
}


async def compare(acts, world=Talk):
    """The group played here and the one played there, equal but for the place in the fault, which is returned."""
    engine = says(talk_renderer(), "look(blue)", "answer(red)")
    here = await play_group(player(world(acts), engine))
    played = world(acts)
    with served(played) as server:
        async with connected(remote(world(), server)) as environment:
            there = await play_group(player(environment, engine))
            assert server.num_open == 0
    assert without_place(there) == without_place(here)
    assert len(there.valid) >= GROUP_SIZE - 1
    return there.trajectories[3].fault


@pytest.mark.parametrize("method", ["setup", "step", "rewards", "close"])
async def test_2_an_exception_reads_the_same(method):
    fault = await compare({method: raising(RuntimeError("the pool is empty"))})
    assert fault == f"talk.{method} raised RuntimeError: the pool is empty (in environment-0)"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_2_exceptions_of_every_kind_read_the_same(error):
    fault = await compare({"step": raising(error)})
    assert fault.endswith("(in environment-0)")
    if isinstance(error, EnvironmentSetupError | SandboxError | DeadlineError | EngineError):
        assert fault == f"{error} (in environment-0)", "our own sentence, nothing before it"


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), StopIteration("enough")], ids=lambda e: type(e).__name__)
async def test_2_exceptions_of_a_plain_function_read_the_same(error):
    assert "(in environment-0)" in await compare({"step": raising(error)}, BlockingTalk)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks don't count their cancellations")
@pytest.mark.parametrize("world", [Talk, BlockingTalk])
async def test_2_a_tool_whose_inner_task_was_cancelled(world):
    assert "CancelledError" in await compare({"step": raising(asyncio.CancelledError())}, world)


@pytest.mark.parametrize(("method", "value"), [(method, value) for method in RETURNS for value in RETURNS[method]], ids=repr)
async def test_2_what_an_environment_should_not_return_reads_the_same(method, value):
    await compare({method: lambda *arguments: value})


async def test_2_the_first_reason_stays():
    fault = await compare({"step": raising(ValueError("first")), "close": raising(ValueError("second"))})
    assert fault == (
        "talk.step raised ValueError: first (in environment-0); then talk.close raised ValueError: second (in environment-0)"
    )


# ── deadlines and deaths ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["setup", "step", "rewards", "close"])
async def test_3_a_coroutine_that_never_returns(method):
    ended = []

    async def forever(*arguments):
        try:
            await asyncio.sleep(FOREVER)
        finally:
            ended.append(method)

    played = Talk({method: forever})
    with served(played) as server:
        async with connected(remote(Talk(), server)) as environment:
            chosen = player(environment, says(talk_renderer(), "answer(red)"), tool_deadline_s=10 * SHORT_S)
            group = await play_group(chosen)
            fault = group.trajectories[3].fault
            assert fault == f"waited 0.5 s for talk.{method} of talk/0/3, which is its deadline, and it did not come"
            await until(lambda: ended and server.num_open == 0, "the work to end there too")
    assert ended == [method]
    assert sorted(played.closed) == [number for number in range(GROUP_SIZE) if method != "setup" or number != 3]


async def test_4_a_process_that_goes_takes_its_own_trajectories_only():
    one, two = Talk({"step": lambda *arguments: asyncio.sleep(FOREVER)}, unlucky=0), Talk()
    with served(two, name="environment-1") as second:
        with served(one) as first:
            environment = remote(Talk(), first, second)
            await environment.start()
            rollout = asyncio.create_task(play_group(player(environment, says(talk_renderer(), "answer(red)"))))
            await until(lambda: len(two.closed) == 4 and one.opened and one.opened[0].seen, "the others to be done")
        group = await rollout
        await environment.stop()
    faults = [trajectory.fault for trajectory in group.trajectories]
    assert faults[0].startswith("environment-0 at http://127.0.0.1:")
    assert faults[0].endswith(" is gone: it stops")
    assert faults[1::2] == [None] * 4


@pytest.mark.real
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3])
async def test_4_a_process_killed_at_any_moment(after_s, tmp_path):
    environment, renderer = lookup(max_hops=3)
    source = environment.tasks("train", 7)
    tasks = [source[index] for index in range(64)]
    here = {one.id: one for group in await lookup_groups(environment, renderer, tasks) for one in group.trajectories}
    with processes(tmp_path, "lookup", loop_limits_s=(60.0, 60.0)) as (first, second):
        async with connected(RemoteEnvironment(environment, [first.url, second.url], token=TOKEN)) as elsewhere:
            rollout = asyncio.create_task(lookup_groups(elsewhere, renderer, tasks))
            await asyncio.sleep(after_s)
            first.popen.kill()
            groups = await asyncio.wait_for(rollout, 60)
        assert second.popen.poll() is None
    played = [one for group in groups for one in group.trajectories]
    assert len(played) == 256
    for one in played:
        if one.fault is None:
            assert one == here[one.id]
        else:
            assert one.fault.startswith("environment-0 at http://127.0.0.1:"), one.fault
            assert " is gone: " in one.fault
    assert sum(one.fault is None for one in played) > 128
    if after_s <= 0.03:
        assert any(one.fault for one in played), "or this would show little"
