"""What happens in a rollout, one test a line. The numbers are those of the tests.

How a turn and a trajectory end

 1. The stop token is sampled like any other token: it is kept, and trained.
 2. A reply that its turn's token limit cuts has stop_reason `length`; the environment is told so, and the trajectory goes on
    and is scored. The end of turn that the model didn't say is the template's: it is read in the next prompt, not trained.
 3. When the tokens of a trajectory are used up it ends with `max_tokens` and is scored. Its last reply gets what is left.
 4. After `max_turns` turns it ends with `max_turns` and is scored.
 5. A malformed call is an observation that the model reads, and it is counted; it ends nothing.
 6. Opening messages that leave no room for a reply are a fault: the policy has done nothing yet.

Faults: the reason is kept, the tokens so far too, the other siblings go on, and it is never a reward of 0

 7. An exception in setup, step, rewards or close.
 8. A reward function that raises leaves no reward, and the others' baseline is without it.
 9. A step that fails and a close that fails after it: the first reason stays.
10. SystemExit, and any other exception that is no Exception, in a tool that is a coroutine and in one that is not.
11. A tool whose own inner task was cancelled.
12. What an environment should not return: nothing at all, numbers that are none, nan, messages that can't be rendered.
13. A coroutine that never returns passes its deadline.
14. A blocking tool that never returns passes its deadline, while the event loop goes on.
15. It doesn't keep the interpreter from exiting either.
16. A trajectory that takes too long in all.
17. An engine that doesn't answer in time.

What ends a run

18. A dead engine raises out of the rollout, whatever else is under way, and leaves nothing running.
19. So does an engine that breaks its own rules; it is no fault of a trajectory.
20. Cancelled from outside, a rollout leaves nothing running, and closes what it opened.
21. Two tasks of one step with the same id are refused.

Rewards and groups

22. One valid sibling is no group: nobody gets credit.
23. A component that is None is left out of the sum; without any component there is no reward and no training.
24. Components are weighted, unnamed ones with 1.
25. Success is the sum of the components as the environment gave them, whatever their weights.

Order and noise

26. A template that rewrites history starts a new sample; one that doesn't makes one sample of all turns.
27. Seeds of requests differ by run, step, task, sibling and turn, and are the same numbers on every machine.
28. With `deterministic`, turn k of everybody is sent together, in order, whatever order the environments answer in.
29. Siblings that end at different turns, fail or hang don't hold up the others there.
30. Never more than `concurrency` trajectories at once, and groups come back in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S
from polyturn.advantages.registry import build_estimator
from polyturn.engine.scripted import ScriptedEngine
from polyturn.environments.base import StepResult
from polyturn.errors import EngineError, EnvironmentSetupError
from polyturn.processes.deadlines import deadline
from polyturn.processes.tasks import left_behind
from polyturn.rollouts import episode
from polyturn.rollouts.driver import rollout_groups
from polyturn.rollouts.episode import Sampling, play, request_seed
from polyturn.trajectories.assemble import assemble
from polyturn.types import Message, Trajectory, TrajectoryGroup
from semantics.scenes import (
    FOREVER,
    FORGETFUL_TEMPLATE,
    GROUP_SIZE,
    SHORT_S,
    BlockingTalk,
    Talk,
    assistant_turns,
    lookup,
    other_tasks,
    play_group,
    player,
    reply_ids,
    says,
    settled,
    talk_renderer,
    talk_task,
)

UNLUCKY = 3


def raising(error: BaseException):
    def act(*arguments):
        raise error

    return act


def returning(value):
    return lambda *arguments: value


def never_returns(*arguments):
    return asyncio.sleep(FOREVER)


@pytest.fixture
def patient_with_others(monkeypatch):
    """Short deadlines are for the unlucky sibling only: a busy machine may let the others wait that long."""

    def chosen(seconds, what):
        return deadline(seconds if f"talk/0/{UNLUCKY}" in what else 60.0, what)

    monkeypatch.setattr(episode, "deadline", chosen)


def solved(trajectory: Trajectory) -> bool:
    return trajectory.end_reason == "done" and trajectory.success and trajectory.outcome_reward == 1.0


def the_unlucky_one(group: TrajectoryGroup) -> Trajectory:
    """The sibling with the fault, having checked that the other seven solved the task and were closed."""
    assert len(group.trajectories) == GROUP_SIZE
    others = [trajectory for trajectory in group.trajectories if trajectory.sibling != UNLUCKY]
    assert [trajectory.fault for trajectory in others] == [None] * 7
    assert all(solved(trajectory) for trajectory in others)
    assert group.valid == tuple(others)
    lost = group.trajectories[UNLUCKY]
    assert lost.fault
    assert lost.end_reason == "fault"
    assert lost.outcome_reward is None
    assert not lost.outcome
    assert not lost.success
    assert math.isnan(lost.total_reward)
    return lost


# ── how a turn and a trajectory end ────────────────────────────────────────────────────────────────────────────────────


async def test_01_the_stop_token_is_kept_and_trained():
    renderer = talk_renderer()
    trajectory = await play(player(Talk(), says(renderer, "look(blue)", "answer(red)")), talk_task(), 0)
    assert [turn.completion_ids[-1] for turn in trajectory.turns] == [renderer.stop_ids[0]] * 2
    assert [turn.text for turn in trajectory.turns] == ["look(blue)", "answer(red)"]
    (sample,) = assemble(trajectory, [0.5, -1.0], temperature=1.0)
    trained = sample.input_ids[sample.loss_mask].tolist()
    assert trained == [*reply_ids(renderer, "look(blue)"), *reply_ids(renderer, "answer(red)")]


async def test_02_a_reply_cut_by_the_turn_limit():
    renderer = talk_renderer()
    environment = Talk()
    engine = says(renderer, "look(red) again again", "answer(red)")
    trajectory = await play(player(environment, engine, max_turn_tokens=5), talk_task(), 0)
    first, second = trajectory.turns
    assert first.stop_reason == "length"
    assert first.completion_ids == reply_ids(renderer, "look(red) again again")[:5]
    assert first.text == "look(red) "
    assert environment.opened[0].seen[0].truncated
    # The end of turn in front of what the tool says was not sampled.
    end = renderer.stop_ids[0]
    assert second.prompt_ids[0] == end
    assert second.continues
    # answer(red) and its stop token are exactly five.
    assert second.stop_reason == "stop"
    assert not environment.opened[0].seen[1].truncated
    assert solved(trajectory)
    (sample,) = assemble(trajectory, [1.0, 1.0], temperature=1.0)
    place = len(first.prompt_ids) + len(first.completion_ids)
    assert sample.input_ids[place] == end
    assert not sample.loss_mask[place]
    assert sample.loss_mask[place - 1]


async def test_03_the_token_budget_of_a_trajectory():
    renderer = talk_renderer()
    environment = Talk()
    engine = says(renderer, "look(blue)")
    opening = len(renderer.open(talk_task().messages).prompt().ids)
    # One whole turn of five, a tool's answer of four, three more tokens.
    trajectory = await play(player(environment, engine, max_trajectory_tokens=opening + 12), talk_task(), 0)
    assert trajectory.end_reason == "max_tokens"
    assert trajectory.truncated
    assert [len(turn.completion_ids) for turn in trajectory.turns] == [5, 3]
    assert [turn.stop_reason for turn in trajectory.turns] == ["stop", "length"]
    assert environment.opened[0].seen[1].truncated
    assert trajectory.outcome_reward == 0.0
    assert trajectory.valid
    (sample,) = assemble(trajectory, [1.0, 1.0], temperature=1.0)
    assert len(sample) == opening + 12
    assert [sampling.max_tokens for _, sampling in engine.requests] == [12, 3]


async def test_04_max_turns():
    trajectory = await play(player(Talk(), says(talk_renderer(), "look(blue)"), max_turns=3), talk_task(), 0)
    assert trajectory.end_reason == "max_turns"
    assert trajectory.truncated
    assert len(trajectory.turns) == 3
    assert [message.content for turn in trajectory.turns for message in turn.reply] == ["blue"] * 3
    assert trajectory.valid
    assert trajectory.total_reward == pytest.approx(3 * 0.25)


async def test_05_a_malformed_call_is_an_observation():
    environment, renderer = lookup(dead_end_share=0.0)
    task = environment.tasks("train", 0)[0]
    gold = list(environment.gold(task))
    engine = says(renderer, "lookup(", *gold)
    trajectory = await play(player(environment, engine, renderer, max_turns=8), task, 0)
    first = trajectory.turns[0]
    assert [message.content for message in first.reply] == ["error"]
    assert first.counts == {"malformed": 1}
    assert first.reward == 0.0
    assert renderer.tokenizer.token_id("error") in trajectory.turns[1].prompt_ids
    assert solved(trajectory)
    assert len(trajectory.turns) == 1 + len(gold)


async def test_06_opening_messages_without_room_for_a_reply():
    engine = says(talk_renderer(), "answer(red)")
    trajectory = await play(player(Talk(), engine, max_trajectory_tokens=5), talk_task(opening="find " * 20 + "red"), 0)
    assert trajectory.end_reason == "fault"
    assert "max_trajectory_tokens=5" in trajectory.fault
    assert engine.requests == []


# ── faults ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("method", "kept"), [("setup", 0), ("step", 1), ("rewards", 2), ("close", 2)])
async def test_07_an_exception_in_the_environment(method, kept):
    renderer = talk_renderer()
    environment = Talk({method: raising(RuntimeError("the pool is empty"))}, unlucky=UNLUCKY)
    group = await play_group(player(environment, says(renderer, "look(blue)", "answer(red)")))
    lost = the_unlucky_one(group)
    assert lost.fault == f"talk.{method} raised RuntimeError: the pool is empty"
    assert [turn.text for turn in lost.turns] == ["look(blue)", "answer(red)"][:kept]
    assert all(turn.completion_ids == reply_ids(renderer, turn.text) for turn in lost.turns)
    assert sorted(environment.closed) == [number for number in range(8) if number != UNLUCKY or method != "setup"]


async def test_08_a_reward_function_that_raises_is_no_reward_of_zero():
    environment = Talk({"rewards": raising(ZeroDivisionError("no tests"))}, unlucky=UNLUCKY)
    group = await play_group(player(environment, says(talk_renderer(), "answer(red)")))
    lost = the_unlucky_one(group)
    assert "ZeroDivisionError: no tests" in lost.fault
    # All valid siblings are equal, so nobody is better than the others; a 0 among them would make seven of them look good.
    (credit,) = build_estimator("turn_rtg", {})([group])
    assert credit.per_turn[UNLUCKY] is None
    assert credit.is_zero


async def test_09_the_first_reason_stays():
    acts = {"step": raising(ValueError("first")), "close": raising(ValueError("second"))}
    lost = the_unlucky_one(await play_group(player(Talk(acts), says(talk_renderer(), "answer(red)"))))
    assert lost.fault.startswith("talk.step raised ValueError: first")
    assert "second" in lost.fault


class Timeout(BaseException):
    """As the libraries that stop a function from another thread raise it."""


@pytest.mark.parametrize("world", [Talk, BlockingTalk])
@pytest.mark.parametrize("error", [SystemExit(3), Timeout("3 s")], ids=["SystemExit", "BaseException"])
async def test_10_exceptions_that_are_no_exception(world, error):
    group = await play_group(player(world({"step": raising(error)}), says(talk_renderer(), "answer(red)")))
    lost = the_unlucky_one(group)
    assert type(error).__name__ in lost.fault
    assert len(lost.turns) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks don't count their cancellations")
@pytest.mark.parametrize("world", [Talk, BlockingTalk])
async def test_11_a_tool_whose_inner_task_was_cancelled(world):
    group = await play_group(player(world({"step": raising(asyncio.CancelledError())}), says(talk_renderer(), "answer(red)")))
    assert "CancelledError" in the_unlucky_one(group).fault


BAD_RETURNS = {
    "step returns nothing": ("step", None, "talk.step"),
    "step returns a text": ("step", "blue", "talk.step"),
    "a reward that is nan": ("step", StepResult(reward=math.nan, done=True), "nan"),
    "a reward that is a text": ("step", StepResult(reward="1", done=True), "reward"),
    "a message that is a text": ("step", StepResult(messages=("blue",)), "talk.step"),
    "a message without text": ("step", StepResult(messages=(Message(role="tool", content=None),)), "talk.step"),
    "a word the tokenizer lacks": ("step", StepResult(messages=(Message(role="tool", content="purple"),)), "purple"),
    "a count that is a text": ("step", StepResult(done=True, counts={"malformed": "one"}), "malformed"),
    "rewards return nothing": ("rewards", None, "talk.rewards"),
    "an outcome that is nan": ("rewards", {"answer": math.nan}, "nan"),
    "an outcome that is infinite": ("rewards", {"answer": -math.inf}, "inf"),
    "an outcome that is a text": ("rewards", {"answer": "1"}, "answer"),
}


@pytest.mark.parametrize("name", BAD_RETURNS)
async def test_12_what_an_environment_should_not_return(name):
    method, value, reason = BAD_RETURNS[name]
    group = await play_group(player(Talk({method: returning(value)}), says(talk_renderer(), "look(blue)", "answer(red)")))
    assert reason in the_unlucky_one(group).fault


@pytest.mark.parametrize("method", ["setup", "step", "rewards", "close"])
async def test_13_a_coroutine_that_never_returns(method, patient_with_others):
    environment = Talk({method: never_returns})
    group = await play_group(player(environment, says(talk_renderer(), "answer(red)"), tool_deadline_s=SHORT_S))
    lost = the_unlucky_one(group)
    assert lost.fault == f"waited 0.05 s for talk.{method} of talk/0/3, which is its deadline, and it did not come"
    assert not other_tasks()


async def test_14_a_blocking_tool_that_never_returns(patient_with_others):
    release = threading.Event()
    finished = []
    environment = BlockingTalk({"step": lambda *arguments: release.wait(PATIENCE_S)})
    try:
        chosen = player(environment, says(talk_renderer(), "answer(red)"), tool_deadline_s=SHORT_S)
        group = await play_group(chosen, on_done=finished.append)
    finally:
        release.set()
    lost = the_unlucky_one(group)
    # On a loop that is held up, the wait returns instead.
    assert lost.fault.startswith("waited 0.05 s for talk.step")
    assert len(lost.turns) == 1
    assert len(finished) == GROUP_SIZE


HANGING_TOOL = """
import asyncio, threading
from semantics.scenes import BlockingTalk, play_group, player, says, talk_renderer

environment = BlockingTalk({"step": lambda *arguments: threading.Event().wait()})
group = asyncio.run(play_group(player(environment, says(talk_renderer(), "answer(red)"), tool_deadline_s=0.05)))
print(group.trajectories[3].fault)
print(sum("call step" in thread.name for thread in threading.enumerate()) > 0)
"""


def test_15_a_tool_that_hangs_does_not_hold_up_the_exit():
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    run = subprocess.run(
        [sys.executable, "-c", HANGING_TOOL],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr
    # The thread is still there when the interpreter is about to end.
    assert run.stdout.splitlines() == [
        "waited 0.05 s for talk.step of talk/0/3, which is its deadline, and it did not come",
        "True",
    ]


async def test_16_a_trajectory_that_takes_too_long_in_all(patient_with_others):
    async def slow(state, reply):
        await asyncio.sleep(0.02)
        return StepResult(messages=(Message(role="tool", content="again"),))

    limits = {"max_turns": 1000, "max_trajectory_tokens": 10**6, "trajectory_deadline_s": 0.1}
    chosen = player(Talk({"step": slow}), says(talk_renderer(), "look(red)", "answer(red)"), **limits)
    lost = the_unlucky_one(await play_group(chosen))
    assert lost.fault == "waited 0.1 s for trajectory talk/0/3, which is its deadline, and it did not come"
    assert lost.turns


async def test_17_an_engine_that_does_not_answer_in_time(patient_with_others):
    renderer = talk_renderer()
    engine = says(renderer, "look(red)", "answer(red)")
    answer = engine.generate

    async def generate(prompt_ids, sampling, *, session=None):
        if sampling.seed == request_seed("0", "talk/0", UNLUCKY, 1):
            await asyncio.sleep(FOREVER)
        return await answer(prompt_ids, sampling)

    engine.generate = generate
    lost = the_unlucky_one(await play_group(player(Talk(), engine, turn_deadline_s=SHORT_S)))
    assert lost.fault.startswith("waited 0.05 s for the engine's reply in turn 1 of talk/0/3")
    assert [turn.text for turn in lost.turns] == ["look(red)"]


# ── what ends a run ────────────────────────────────────────────────────────────────────────────────────────────────────


def dying_engine(error: Exception) -> ScriptedEngine:
    """Says one thing in the first turn and dies in the second."""
    renderer = talk_renderer()
    return ScriptedEngine(lambda context: error if assistant_turns(renderer, context) else reply_ids(renderer, "look(red)"))


@pytest.mark.parametrize("deterministic", [False, True])
async def test_18_a_dead_engine_ends_the_rollout(deterministic):
    environment = Talk({"step": never_returns})
    chosen = player(environment, dying_engine(EngineError("out of memory")), tool_deadline_s=FOREVER)
    if deterministic:
        environment.acts = {}
    with pytest.raises(EngineError, match="out of memory"):
        await asyncio.wait_for(play_group(chosen, deterministic=deterministic), 30)
    assert not other_tasks()
    assert sorted(environment.closed) == list(range(8))


async def test_19_an_engine_that_breaks_its_own_rules_ends_the_rollout():
    with pytest.raises(EngineError, match="IndexError: 7"):
        await play_group(player(Talk(), dying_engine(IndexError("7"))))
    assert not other_tasks()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("waiting", ["engine", "tool"])
async def test_20_a_rollout_cancelled_from_outside(waiting, deterministic):
    environment = Talk({"step": never_returns} if waiting == "tool" else {})
    engine = says(talk_renderer(), "look(red)", delay_s=FOREVER if waiting == "engine" else 0.0)
    rollout = asyncio.create_task(play_group(player(environment, engine, max_turns=10**6), deterministic=deterministic))
    async with deadline(30, "all trajectories to be under way"):
        while len(environment.opened) < GROUP_SIZE or not engine.requests:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.001)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert not other_tasks()
    assert sorted(environment.closed) == list(range(8))


async def test_21_two_tasks_with_one_id_are_refused():
    chosen = player(Talk(), says(talk_renderer(), "answer(red)"))
    with pytest.raises(EnvironmentSetupError, match="talk/1"):
        await rollout_groups(chosen, [talk_task("talk/1"), talk_task("talk/1")], group_size=2, concurrency=4)
    assert not other_tasks()


# ── rewards and groups ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_22_one_valid_sibling_is_no_group():
    environment = Talk({"step": raising(OSError("gone"))}, unlucky=0)
    group = await play_group(player(environment, says(talk_renderer(), "answer(red)")), size=2)
    assert [trajectory.valid for trajectory in group.trajectories] == [False, True]
    for name in ("turn_rtg", "grpo", "rloo"):
        (credit,) = build_estimator(name, {})([group])
        assert credit.per_turn == (None, None)
        assert credit.is_empty


@pytest.mark.parametrize(
    ("outcome", "reward"), [({"answer": 1.0, "style": None}, 1.0), ({"answer": None, "style": None}, None), ({}, None)]
)
async def test_23_components_that_are_missing(outcome, reward):
    environment = Talk({"rewards": returning(outcome)}, unlucky=0)
    trajectory = await play(player(environment, says(talk_renderer(), "answer(red)")), talk_task(), 0)
    assert trajectory.fault is None
    assert trajectory.outcome == outcome
    assert trajectory.outcome_reward == reward
    assert trajectory.valid == (reward is not None)
    assert trajectory.success == (reward is not None)


async def test_24_weights_of_the_components():
    environment = Talk({"rewards": returning({"answer": 1.0, "style": 0.5, "length": 4.0})}, unlucky=0)
    chosen = player(environment, says(talk_renderer(), "answer(red)"), reward_weights={"style": 3.0, "length": 0.0})
    trajectory = await play(chosen, talk_task(), 0)
    assert trajectory.outcome_reward == pytest.approx(1.0 + 3.0 * 0.5)
    assert trajectory.total_reward == pytest.approx(2.5 + 0.25)


async def test_25_success_is_the_environments_own_verdict():
    environment = Talk({"rewards": returning({"answer": 1.0})}, unlucky=0)
    chosen = player(environment, says(talk_renderer(), "answer(red)"), reward_weights={"answer": 0.1})
    trajectory = await play(chosen, talk_task(), 0)
    assert trajectory.success
    assert trajectory.outcome_reward == pytest.approx(0.1)
    environment.acts = {"rewards": returning({"answer": 0.9})}
    environment.unlucky = 1
    assert not (await play(chosen, talk_task(), 0)).success


# ── order and noise ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("forgetful", [False, True])
async def test_26_a_template_that_rewrites_history_starts_a_new_sample(forgetful):
    renderer = talk_renderer(FORGETFUL_TEMPLATE) if forgetful else talk_renderer()
    engine = says(renderer, "think look(red)", "look(blue)", "answer(red)")
    trajectory = await play(player(Talk(), engine, renderer), talk_task(), 0)
    assert [turn.continues for turn in trajectory.turns] == [False, not forgetful, True]
    samples = assemble(trajectory, [1.0, 2.0, 3.0], temperature=1.0)
    contexts = [context for context, _ in engine.requests]
    assert len(samples) == (2 if forgetful else 1)
    if forgetful:
        assert samples[0].input_ids.tolist() == [*contexts[0], *reply_ids(renderer, "think look(red)")]
        assert renderer.tokenizer.token_id("think") not in samples[1].input_ids
        assert sorted(set(samples[1].turn_index.tolist())) == [-1, 1, 2]
    assert samples[-1].input_ids.tolist() == [*contexts[2], *reply_ids(renderer, "answer(red)")]


async def test_27_the_seeds_of_requests():
    engine = says(talk_renderer(), "look(red)", "answer(red)")
    for seed_key in ("7/train/1", "7/train/2", "8/train/1", "7/eval/sampled"):
        tasks = [talk_task("talk/0"), talk_task("talk/1")]
        chosen = player(Talk(), engine, seed_key=seed_key)
        await rollout_groups(chosen, tasks, group_size=3, concurrency=64)
    seeds = [sampling.seed for _, sampling in engine.requests]
    assert len(seeds) == 4 * 2 * 3 * 2
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed("7/train/1", "talk/0", 2, 1) in seeds
    assert request_seed("7/train/1", "talk/0", 2, 1) == EXPECTED_SEED
    # Parts are kept apart: 1 and 12 are not 11 and 2.
    assert request_seed("a", 1, 12) != request_seed("a", 11, 2)


EXPECTED_SEED = 8597362966433937093


class Uneven(Talk):
    """Siblings are set up, and answered, in an order of their own that changes from turn to turn."""

    async def setup(self, task):
        state = await super().setup(task)
        for _ in range(3 * (5 * state.number % 8)):
            await asyncio.sleep(0)
        return state

    async def step(self, state, reply):
        for _ in range(3 * ((3 * state.number + len(state.seen)) % 8)):
            await asyncio.sleep(0)
        return await super().step(state, reply)


@pytest.mark.parametrize("deterministic", [True, False])
async def test_28_turns_are_sent_together_and_in_order(deterministic):
    engine = says(talk_renderer(), "look(red)", "look(blue)", "answer(red)")
    chosen = player(Uneven(), engine)
    tasks = [talk_task("talk/0"), talk_task("talk/1")]
    # A single slot would deadlock a barrier that respected it.
    concurrency = 1 if deterministic else 64
    groups = await rollout_groups(chosen, tasks, group_size=4, concurrency=concurrency, deterministic=deterministic)
    assert all(solved(trajectory) for group in groups for trajectory in group.trajectories)
    sent = [sampling.seed for _, sampling in engine.requests]
    in_order = [request_seed("0", task.id, sibling, turn) for turn in range(3) for task in tasks for sibling in range(4)]
    assert sorted(sent) == sorted(in_order)
    assert (sent == in_order) == deterministic


class Ragged(Talk):
    """Sibling n is done after n + 1 turns, 5 raises in its second turn, 6 hangs in its second, 7 can't be set up."""

    async def setup(self, task):
        state = await super().setup(task)
        if state.number == 7:
            raise OSError("no room")
        return state

    async def step(self, state, reply):
        result = await super().step(state, reply)
        turn = len(state.seen)
        if turn == 2 and state.number == 5:
            raise OSError("gone")
        if turn == 2 and state.number == 6:
            await asyncio.sleep(FOREVER)
        return StepResult(messages=result.messages, done=turn > state.number)


async def test_29_nobody_is_held_up_at_the_barrier():
    engine = says(talk_renderer(), "look(red)")
    chosen = player(Ragged(), engine, max_turns=5, tool_deadline_s=SHORT_S)
    group = await asyncio.wait_for(play_group(chosen, deterministic=True), 30)
    assert [len(trajectory.turns) for trajectory in group.trajectories] == [1, 2, 3, 4, 5, 2, 2, 0]
    assert [trajectory.end_reason for trajectory in group.trajectories] == ["done"] * 5 + ["fault"] * 3
    per_turn = [assistant_turns(talk_renderer(), context) for context, _ in engine.requests]
    assert per_turn == sorted(per_turn)
    assert not other_tasks()


async def test_30_concurrency_and_order():
    under_way, most, finished = 0, 0, []

    class Counting(Uneven):
        async def setup(self, task):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            return await super().setup(task)

        async def close(self, state):
            nonlocal under_way
            under_way -= 1

    chosen = player(Counting(), says(talk_renderer(), "answer(red)"), sampling=Sampling(temperature=0.7, top_k=5))
    tasks = [talk_task(f"talk/{index}") for index in range(3)]
    groups = await rollout_groups(chosen, tasks, group_size=4, concurrency=5, on_done=finished.append)
    assert most == 5
    assert [group.task for group in groups] == tasks
    assert [[trajectory.id for trajectory in group.trajectories] for group in groups] == [
        [f"talk/{index}/{sibling}" for sibling in range(4)] for index in range(3)
    ]
    assert sorted(trajectory.id for trajectory in finished) == sorted(t.id for g in groups for t in g.trajectories)
    assert {(s.temperature, s.top_k, s.stop_ids) for _, s in chosen.engine.requests} == {(0.7, 5, talk_renderer().stop_ids)}
    await settled()
    assert not other_tasks()


async def test_31_an_environment_that_swallows_its_cancellation(monkeypatch):
    monkeypatch.setattr(episode, "STUCK_S", SHORT_S)
    release, closed = asyncio.Event(), []

    class Deaf(Talk):
        async def step(self, state, reply):
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()
            return await super().step(state, reply)

        async def close(self, state):
            closed.append(state)

    limits = {"tool_deadline_s": SHORT_S, "trajectory_deadline_s": 2 * SHORT_S}
    chosen = player(Deaf(), says(talk_renderer(), "answer(red)"), **limits)
    (lost,) = (await asyncio.wait_for(play_group(chosen, size=1), 30)).trajectories
    assert lost.fault == "talk.step of talk/0/0 went on after the trajectory's deadline of 0.1 s, though cancelled"
    assert [turn.text for turn in lost.turns] == ["answer(red)"]
    assert not closed, "nobody takes away what the tool still uses"
    assert left_behind() == ["trajectory talk/0/0"]
    assert not other_tasks(), "the end of the loop waits for nobody"
    release.set()
    await settled(50)
    assert not left_behind()
    assert len(closed) == 1
    assert lost.end_reason == "fault"


async def test_32_an_environment_that_cancels_the_task_it_runs_in():
    async def step(*arguments):
        asyncio.current_task().cancel()
        await asyncio.sleep(FOREVER)

    group = await play_group(player(Talk({"step": step}), says(talk_renderer(), "answer(red)")))
    assert the_unlucky_one(group).fault == f"talk.step of talk/0/{UNLUCKY} cancelled the task that it ran in"
