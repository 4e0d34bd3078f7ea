"""The recipe's rewards beside an environment's own: sums, names, success; chat and mixes."""

from __future__ import annotations

import pytest

from polyturn.environments.base import Environment, Reply, StepResult, TaskList
from polyturn.environments.builtin.chat import Chat
from polyturn.environments.contract import play_by_hand
from polyturn.environments.mixed import Mixed
from polyturn.environments.rewarded import Rewarded
from polyturn.environments.rewards.base import Reward
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.types import Message, Row, Task


class Guess(Environment):
    """Say the word; each wrong guess is answered. Scores nothing unless told to."""

    name = "guess"

    def __init__(self, *, own: bool = True) -> None:
        self.scores = own
        self.closed = 0

    def tasks(self, split, seed):
        return TaskList([task("red")])

    async def setup(self, task):
        return {"task": task, "said": []}

    def step(self, state, reply):
        state["said"].append(reply.text)
        if reply.text == state["task"].answer:
            return StepResult(reward=0.5, done=True, state_key="k")
        return StepResult(messages=(Message(role="tool", content="no"),), reward=0.25, counts={"wrong": 1})

    async def rewards(self, state):
        return {"guessed": float(state["said"][-1] == state["task"].answer)} if self.scores else {}

    async def close(self, state):
        self.closed += 1

    def gold(self, task):
        return [task.answer]


def task(answer="red", environment="guess", **info):
    return Task(id="1", environment=environment, messages=(Message(role="user", content="guess"),), answer=answer, info=info)


def reward(function, name="mine", **more):
    return Reward(name=name, function=function, **more)


def length(view, task):
    return len(view.text)


async def play(environment, *replies, of=None):
    return await play_by_hand(environment, of or task(), replies)


async def test_components_stand_beside_the_environments_own():
    environment = Rewarded(
        Guess(), [reward(length, weight=9.0), reward(lambda view, task: {"turns": len(view.turns), "none": None}, name="two")]
    )
    episode = await play(environment, "blue", "red")
    assert episode.outcome == {"guessed": 1.0, "mine": 3.0, "two/turns": 2.0, "two/none": None}
    assert episode.turn_rewards == (0.25, 0.5), "weights of outcomes belong to the player, turns are the environment's"
    assert environment.inner.closed == 1
    assert (environment.name, environment.scores) == ("guess", True)


async def test_rewards_of_turns_are_added_and_counted():
    seen = []

    async def of_turn(view, task):
        seen.append((view.scope, len(view.turns), view.text, view.done))
        return {"a": 1.0, "b": None}

    environment = Rewarded(Guess(), [reward(of_turn, name="step", scope="turn", weight=0.5)])
    state = await environment.setup(task())
    first = await environment.step(state, Reply(text="blue", num_tokens=4))
    assert (first.reward, first.counts) == (0.75, {"wrong": 1, "reward/step/a": 1.0})
    assert first.messages == (Message(role="tool", content="no"),)
    last = await environment.step(state, Reply(text="red", truncated=True))
    assert (last.reward, last.done, last.state_key) == (1.0, True, "k")
    assert seen == [("turn", 1, "blue", False), ("turn", 2, "red", True)]
    assert await environment.rewards(state) == {"guessed": 1.0}
    assert [(turn.num_tokens, turn.truncated, turn.reward) for turn in state.turns] == [(4, False, 0.25), (0, True, 0.5)]


async def test_the_view_holds_the_whole_conversation():
    found = []
    await play(Rewarded(Guess(), [reward(lambda view, task: found.append(view) or 0)]), "blue", "red")
    (view,) = found
    assert [(message.role, message.content) for message in view.messages] == [
        ("user", "guess"),
        ("assistant", "blue"),
        ("tool", "no"),
        ("assistant", "red"),
    ]
    assert (view.turns[0].results, view.turns[0].counts, view.done, view.scope) == (("no",), {"wrong": 1}, True, "trajectory")


async def test_a_name_that_the_environment_has_already():
    with pytest.raises(EnvironmentSetupError, match="the reward 'guessed' is called like a component of guess"):
        await play(Rewarded(Guess(), [reward(length, name="guessed")]), "red")


@pytest.mark.parametrize(
    ("own", "success_at", "outcome", "success"),
    [
        (True, None, {"guessed": 1.0, "mine": -5.0}, True),
        (True, None, {"guessed": 0.0, "mine": 5.0}, False),
        (True, 3.0, {"guessed": 1.0, "mine": 2.0}, False),
        (True, 3.0, {"guessed": 1.0, "mine": 3.0}, True),
        (True, 3.0, {"guessed": 1.0, "mine/a": 2.0, "mine/b": 1.0}, True),
        (False, None, {"mine": 1.0, "other": -1.0}, True),
        (False, None, {"mine": 0.9}, False),
        (False, None, {"mine": None}, False),
        (False, 0.5, {"mine": 0.6}, True),
    ],
)
def test_success(own, success_at, outcome, success):
    environment = Rewarded(Guess(own=own), [reward(length, success_at=success_at), reward(length, name="other")])
    assert environment.succeeded(task(), outcome) == success


def test_success_without_any_reward_of_trajectories():
    environment = Rewarded(Guess(own=False), [reward(length, scope="turn")])
    assert not environment.scores
    assert not environment.succeeded(task(), {})


# ── chat ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def row(**more):
    return Row(
        **(
            {
                "where": "a.jsonl:1",
                "format": "question/answer",
                "messages": (Message(role="user", content="2 + 2?"),),
                "answer": "4",
            }
            | more
        )
    )


def test_a_row_becomes_a_task():
    made = Chat().task_from_example(
        row(aliases=("four",), tests=("assert 1",), difficulty="easy", tags=("sum",), follow_up="And 3 + 3?", rest={"id": 7})
    )
    assert (made.id, made.environment, made.answer) == ("a.jsonl:1", "chat", "4")
    assert made.info == {
        "id": 7,
        "aliases": ["four"],
        "tests": ["assert 1"],
        "difficulty": "easy",
        "tags": ["sum"],
        "follow_up": "And 3 + 3?",
    }


def test_a_system_message_unless_the_row_has_one():
    environment = Chat(system="Be brief.")
    assert [message.content for message in environment.task_from_example(row()).messages] == ["Be brief.", "2 + 2?"]
    own = row(messages=(Message(role="system", content="Be kind."), Message(role="user", content="2 + 2?")))
    assert environment.task_from_example(own).messages == own.messages


async def test_a_follow_up_is_a_second_user_turn_of_the_same_trajectory():
    environment = Chat(exact=True)
    made = environment.task_from_example(row(follow_up="And 3 + 3?", follow_up_response="6"))
    assert list(environment.gold(made)) == ["4", "6"]
    episode = await play_by_hand(environment, made, ["four", "6", "never said"])
    assert [(message.role, message.content) for message in episode.transcript] == [
        ("user", "2 + 2?"),
        ("assistant", "four"),
        ("user", "And 3 + 3?"),
        ("assistant", "6"),
    ]
    assert (episode.done, episode.outcome) == (True, {"answer": 0.0})
    made = environment.task_from_example(row(aliases=("four",), follow_up="And 3 + 3?", follow_up_response="6"))
    assert (await play_by_hand(environment, made, ["Four!", "6."])).outcome == {"answer": 1.0}
    assert (await play_by_hand(environment, made, ["4", "7"])).outcome == {"answer": 0.0}
    assert (await play_by_hand(environment, made, ["4"])).outcome == {"answer": 0.0}, "cut before the second question"


async def test_one_reply_without_a_follow_up():
    environment = Chat()
    episode = await play_by_hand(environment, environment.task_from_example(row()), ["4"])
    assert (episode.done, episode.outcome, environment.scores) == (True, {}, False)


def test_what_chat_refuses():
    with pytest.raises(EnvironmentSetupError, match=r"takes its tasks from rows; set data\.path"):
        Chat().tasks("train", 0)
    with pytest.raises(EnvironmentSetupError, match="leave need_answer at true"):
        Chat(exact=True, need_answer=False)
    with pytest.raises(DataError, match="has no answer to compare with"):
        Chat().gold(task(None))
    with pytest.raises(DataError, match="in a built-in format only"):
        Chat().task_from_row({}, "1")


# ── mixes ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_each_task_is_played_by_the_environment_it_names():
    first, second = Guess(), Rewarded(Guess(own=False), [reward(length)])
    mixed = Mixed({"a": first, "b": second})
    episode = await play(mixed, "blue", "red", of=task(environment="a"))
    assert (episode.outcome, episode.turn_rewards) == ({"guessed": 1.0}, (0.25, 0.5))
    episode = await play(mixed, "red", of=task(environment="b"))
    assert episode.outcome == {"mine": 3.0}
    assert (first.closed, second.inner.closed) == (1, 1)
    assert mixed.gold(task(environment="b")) == ["red"]
    assert mixed.succeeded(task(environment="a"), {"guessed": 1.0})
    assert mixed.succeeded(task(environment="b"), {"mine": 1.0})
    assert not mixed.succeeded(task(environment="b"), {"mine": 0.0})


async def test_a_task_of_no_part():
    with pytest.raises(EnvironmentSetupError, match="belongs to 'c', which is no part of the mix"):
        await Mixed({"a": Guess()}).setup(task(environment="c"))
    with pytest.raises(EnvironmentSetupError, match="makes no tasks of its own"):
        Mixed({"a": Guess()}).tasks("train", 0)
