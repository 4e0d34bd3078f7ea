"""lookup: its tasks, how it answers and rewards, its demonstrations and its words."""

from __future__ import annotations

import asyncio
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.environments.base import Reply
from polyturn.environments.builtin.lookup import GIVE_UP_SHARE, NAMES, NUM_HELD_OUT, VALUES, Lookup
from polyturn.environments.contract import play_by_hand
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.types import Task
from semantics.scenes import renderer_of

levels = st.one_of(
    st.tuples(st.just("chain"), st.integers(1, 12)),
    st.tuples(st.just("maze"), st.integers(1, 4)),
)


def lookup(level="chain", max_hops=4, **arguments) -> Lookup:
    return Lookup(level=level, max_hops=max_hops, **{"instructions": False, **arguments})


def train_task(environment: Lookup, index: int, seed: int = 0) -> Task:
    return environment.tasks("train", seed)[index]


def reachable(task: Task) -> dict[str, int]:
    """Names that pointers lead to from the start, with how often they were met."""
    met: dict[str, int] = {}
    ahead = [task.info["start"]]
    while ahead:
        name = ahead.pop()
        met[name] = met.get(name, 0) + 1
        if met[name] == 1:
            ahead += task.info["records"][name].get("next", [])
    return met


# ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(levels, st.integers(0, 99), st.integers(0, 10**6), st.sampled_from(["train", "eval"]))
def test_a_task_is_a_small_tree_with_one_end_or_none(level, seed, index, split):
    environment = lookup(*level)
    task = environment.tasks(split, seed)[index if split == "train" else index % NUM_HELD_OUT]
    records = task.info["records"]
    assert reachable(task) == dict.fromkeys(records, 1)
    assert set(records) <= set(NAMES)
    values = [record["value"] for record in records.values() if "value" in record]
    assert values == [task.answer] if task.answer != "none" else values == []
    assert task.answer in (*VALUES, "none")
    hops = len(environment.gold(task)) - 1
    assert 1 <= hops <= environment.max_hops
    pointers = [record["next"] for record in records.values() if record.get("next")]
    if environment.level == "chain":
        assert len(records) == hops
        assert all(len(pointed) == 1 for pointed in pointers)
    else:
        # Every fork has one way on and one dead end, and the value is always there.
        assert task.answer in VALUES
        assert len(pointers) == hops - 1
        assert all(len(pointed) == 2 and [records[name] for name in pointed].count({}) == 1 for pointed in pointers)
    assert task.messages[-1].content == f"find({task.info['start']})"


def test_tasks_depend_on_seed_index_and_settings_only():
    one = [train_task(lookup(), index) for index in range(30)]
    assert one == [train_task(lookup(turn_reward=0.3), index) for index in range(30)]
    assert one == [train_task(lookup(), index) for index in reversed(range(30))][::-1]
    for other in (lookup(max_hops=5), lookup(level="maze"), lookup(dead_end_share=0.2)):
        assert one != [train_task(other, index) for index in range(30)]
    assert one != [train_task(lookup(), index, seed=1) for index in range(30)]
    assert len({task.id for task in one}) == 30


def test_a_task_is_the_same_on_every_machine():
    task = train_task(lookup(level="maze", max_hops=3, dead_end_share=0.1), 5, seed=2)
    assert (task.id, task.answer, task.info["start"]) == ("train/2/5", "nine", "harbor")
    assert list(task.info["records"]) == ["harbor", "orchid", "pine", "lemur", "fox"]


def test_the_held_out_split_is_fixed_and_apart():
    environment = lookup()
    held_out = environment.tasks("eval", 0)
    assert held_out.size == NUM_HELD_OUT == 512
    assert [held_out[index] for index in range(20)] == [environment.tasks("eval", 9)[index] for index in range(20)]
    assert environment.tasks("train", 0).size is None
    shown = {
        (tuple(t.info["records"]), t.answer) for t in (held_out[index] for index in range(512)) if len(t.info["records"]) > 2
    }
    trained = {(tuple(t.info["records"]), t.answer) for t in (train_task(environment, index) for index in range(500))}
    assert not shown & trained


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.1, 20, 65), (1.0, 400, 400)])
def test_dead_ends_are_as_many_as_asked_for(share, low, high):
    environment = lookup(dead_end_share=share)
    dead = [task for task in (train_task(environment, index) for index in range(400)) if task.answer == "none"]
    assert low <= len(dead) <= high
    assert all({} in task.info["records"].values() for task in dead)


@pytest.mark.parametrize(("level", "most"), [("chain", 6), ("maze", 4)])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_all_lengths_come_up_equally_in_any_stretch(level, most, split):
    environment = lookup(level=level, max_hops=most)
    source = environment.tasks(split, 0)
    for start in (0, 5, 32):
        lengths = [len(environment.gold(source[start + index])) - 1 for index in range(3 * most)]
        assert sorted(lengths) == sorted([*range(1, most + 1)] * 3)


def test_instructions_come_first_and_can_be_left_out():
    with_them = train_task(Lookup(), 0)
    assert [message.role for message in with_them.messages] == ["system", "user"]
    assert [message.role for message in train_task(lookup(), 0).messages] == ["user"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"level": "mace"}, "environment.args.level='mace' is no level of lookup; did you mean maze?"),
        ({"level": 3}, "environment.args.level=3 is no level of lookup; valid: chain, maze"),
        ({"max_hops": 0}, "environment.args.max_hops=0 is out of range for level chain; use 1 to 12"),
        ({"max_hops": 13}, "environment.args.max_hops=13 is out of range for level chain; use 1 to 12"),
        ({"level": "maze", "max_hops": 5}, "environment.args.max_hops=5 is out of range for level maze; use 1 to 4"),
        ({"max_hops": 2.5}, "environment.args.max_hops=2.5 is no whole number"),
        ({"max_hops": "3"}, "environment.args.max_hops='3' is no whole number"),
        ({"dead_end_share": 1.5}, "environment.args.dead_end_share=1.5 is not a share; use 0 to 1"),
        ({"dead_end_share": -0.1}, "environment.args.dead_end_share=-0.1 is not a share; use 0 to 1"),
        ({"dead_end_share": float("nan")}, "environment.args.dead_end_share=nan is not a share; use 0 to 1"),
        ({"turn_reward": float("nan")}, "environment.args.turn_reward=nan is no number"),
        ({"turn_reward": "0.1"}, "environment.args.turn_reward='0.1' is no number"),
    ],
)
def test_arguments_that_can_not_be(arguments, said):
    with pytest.raises(EnvironmentSetupError) as caught:
        Lookup(**arguments)
    assert str(caught.value).startswith(said)


# ── playing ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def hand_made(**records) -> Task:
    """A maze of hand: maple forks to otter (dead) and heron, which holds seven."""
    rows = records or {"maple": {"next": ["otter", "heron"]}, "otter": {}, "heron": {"value": "seven"}}
    return lookup().task_from_row({"start": next(iter(rows)), "records": rows, "answer": "seven"}, "hand/1")


async def said(*replies: str, task: Task | None = None, truncated: bool = False):
    environment, task = lookup(), task or hand_made()
    state = await environment.setup(task)
    results = [await environment.step(state, Reply(text=text, truncated=truncated)) for text in replies]
    return results, await environment.rewards(state)


def shown(results):
    return [message.content for result in results for message in result.messages]


async def test_what_the_tool_says():
    results, outcome = await said("lookup(maple)", "lookup(otter)", "lookup(heron)", "lookup(raven)", "answer(seven)")
    assert shown(results) == ["next(otter,heron)", "nothing", "value(seven)", "error"]
    assert [result.done for result in results] == [False, False, False, False, True]
    assert [dict(result.counts) for result in results] == [{}, {}, {}, {"unknown_record": 1}, {}]
    assert all(message.role == "tool" for result in results for message in result.messages)
    assert outcome == {"answer": 1.0}


async def test_progress_is_rewarded_once():
    results, _ = await said(
        "lookup(heron)", "lookup(maple)", "lookup(maple)", "lookup(otter)", "lookup(heron)", "answer(seven)"
    )
    assert [result.reward for result in results] == [0.1, 0.1, 0.0, 0.0, 0.0, 0.0]


async def test_states_are_named_before_the_reply_and_by_what_is_known():
    one, _ = await said("lookup(maple)", "lookup(otter)", "lookup(heron)", "lookup()", "answer(none)")
    other, _ = await said("lookup(otter)", "lookup(raven)", "lookup(maple)", "answer(none)")
    assert [result.state_key for result in one] == ["", "maple", "maple,otter", "heron,maple,otter", "heron,maple,otter"]
    assert [result.state_key for result in other] == ["", "otter", "otter", "maple,otter"]


@pytest.mark.parametrize(
    "text",
    (
        "|lookup|lookup(|lookup()|lookup(maple|lookup maple|LOOKUP(maple)|lookup(maple)lookup(otter)|lookup(maple,otter)|"
        "lookup('maple')|find(maple)|lookup(maple) please|lookup((maple))|lookup(Maple)|answer(seven|answer()|"
        "ansswer(seven)|lookup(maple)\nanswer(seven)"
    ).split("|"),
)
async def test_a_malformed_call_is_answered_and_counted(text):
    (result,), outcome = await said(text)
    assert shown([result]) == ["error"]
    assert result.counts == {"malformed": 1}
    assert not result.done
    assert result.reward == 0.0
    assert outcome == {"answer": 0.0}


@pytest.mark.parametrize("text", ["lookup(maple)", " lookup( maple ) ", "\nlookup(maple)\n"])
async def test_white_space_around_a_call_is_no_mistake(text):
    (result,), _ = await said(text)
    assert shown([result]) == ["next(otter,heron)"]


async def test_half_a_call_is_not_taken_for_a_whole_one():
    """A reply that was cut may look whole: answer(six) of answer(sixteen) with a lenient reader."""
    (result,), outcome = await said("answer(seven)", truncated=True)
    assert not result.done
    assert result.counts == {"malformed": 1}
    assert outcome == {"answer": 0.0}


@pytest.mark.parametrize(("answer", "score"), [("seven", 1.0), ("six", 0.0), ("none", 0.0), ("maple", 0.0)])
async def test_the_answer(answer, score):
    results, outcome = await said(f"answer({answer})")
    assert results[0].done
    assert outcome == {"answer": score}


# ── demonstrations ─────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=40)
@given(levels, st.integers(0, 10**6), st.floats(0, 1))
def test_gold_walks_straight_and_scores(level, index, share):
    environment = lookup(*level, dead_end_share=share)
    task = train_task(environment, index)
    episode = asyncio.run(play_by_hand(environment, task, environment.gold(task)))
    assert episode.done
    assert episode.outcome == {"answer": 1.0}
    assert episode.turn_rewards == (0.1,) * (len(episode.turn_rewards) - 1) + (0.0,)


@pytest.mark.parametrize(("level", "max_hops"), [("chain", 6), ("maze", 4)])
def test_demonstrations_give_up_where_persistence_is_needed(level, max_hops):
    """At every point with a way ahead that has not been tried, 65 % give up, and all end with an answer."""
    environment = lookup(level=level, max_hops=max_hops, dead_end_share=0.3)
    went_on = gave_up = 0
    for index in range(600):
        task = train_task(environment, index)
        records = task.info["records"]
        *calls, last = environment.demonstrations(task, random.Random(index))
        names = [re.fullmatch(r"lookup\((\w+)\)", call).group(1) for call in calls]
        assert names[0] == task.info["start"]
        assert len(set(names)) == len(names)
        known = {task.info["start"]}
        for place, name in enumerate(names):
            assert name in known, "a demonstration knows only what it was shown"
            known |= set(records[name].get("next", []))
            ways_ahead = known - set(names[: place + 1])
            if "value" in records[name]:
                assert last == f"answer({task.answer})"
            elif ways_ahead:
                went_on += place + 1 < len(names)
                gave_up += place + 1 == len(names)
        if "value" not in records[names[-1]]:
            assert last == "answer(none)"
    points = went_on + gave_up
    assert points > 400
    spread = 4 * (GIVE_UP_SHARE * (1 - GIVE_UP_SHARE) / points) ** 0.5
    assert abs(gave_up / points - 0.65) < spread


def test_demonstrations_depend_on_their_random_numbers_only():
    environment = lookup(level="maze", max_hops=4)
    task = train_task(environment, 3)
    assert environment.demonstrations(task, random.Random(3)) == environment.demonstrations(task, random.Random(3))
    made = {tuple(environment.demonstrations(task, random.Random(seed))) for seed in range(200)}
    # Where to give up is drawn; which of two pointers comes first is not, for nobody could tell.
    assert len(made) > 2
    longest = max(made, key=len)
    assert all(calls[:-1] == longest[: len(calls) - 1] for calls in made)


# ── rows of a file ─────────────────────────────────────────────────────────────────────────────────────────────────────

ROW = {"start": "a", "records": {"a": {"next": ["b"]}, "b": {"value": "red"}}, "answer": "red"}


def row(**changes):
    return {key: value for key, value in {**ROW, **changes}.items() if value != "absent"}


@pytest.mark.parametrize(
    "made",
    [
        ROW,
        row(records={"a": {"next": ["b", "c"]}, "b": {"next": ["a"]}, "c": {"value": "red"}}),
        row(records={"a": {"next": ["b"]}, "b": {"next": ["a"]}}, answer="none"),
        row(records={"a": {}}, answer="none"),
        row(records={"a": {"next": []}, "z": {"value": "red"}}, answer="none"),
        row(records={"a": {"value": "red", "next": None}}),
        row(records={"a": {"value": None, "next": ["b"]}, "b": {"value": "red"}}),
    ],
)
async def test_rows_make_tasks_that_gold_solves(made):
    environment = lookup()
    task = environment.task_from_row(made, "data.jsonl:1")
    assert task.id == "data.jsonl:1"
    assert task.messages[-1].content == "find(a)"
    episode = await play_by_hand(environment, task, environment.gold(task))
    assert episode.done
    assert episode.outcome == {"answer": 1.0}
    for seed in range(5):
        *_, last = environment.demonstrations(task, random.Random(seed))
        assert last in ("answer(red)", "answer(none)")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (row(start="absent"), "field 'start' is missing or empty; a lookup row needs start, records and answer"),
        (row(records="absent"), "field 'records' is missing or empty"),
        (row(answer=None), "field 'answer' is missing or empty"),
        (row(answer=""), "field 'answer' is missing or empty"),
        (row(records={}), "start 'a' is no name of 'records'"),
        (row(records=[1]), "field 'records' must map names to {'value': ...}, {'next': [...]} or {}"),
        (row(records={"a": "red"}), "field 'records' must map names"),
        (row(start="z"), "start 'z' is no name of 'records'"),
        (row(records={"a": {"next": {"b": 1}}}), "record 'a': 'next' must be a list of names"),
        (row(start=["a"]), "start ['a'] is no name of 'records'"),
        (row(records={"a": {"next": ["b"]}}), "record 'a' points to 'b', which 'records' does not hold"),
        (row(records={"a": {"next": "b"}, "b": {"value": "red"}}), "record 'a': 'next' must be a list of names"),
        (row(records={"a": {"next": [1]}, "1": {}}), "record 'a': 'next' must be a list of names"),
        (row(records={"a": {"next": [["b"]]}}), "record 'a': 'next' must be a list of names"),
        (row(records={"a": {"value": 7}}, answer="7"), "record 'a': the value 7 can't be said in a call"),
        (row(records={"a": {"value": "Red"}}, answer="Red"), "record 'a': the value 'Red' can't be said in a call"),
        (row(start="A 1", records={"A 1": {"value": "red"}}), "the name 'A 1' can't be said in a call"),
        (row(answer="blue"), "the answer 'blue' is not what the records lead to, which is 'red'"),
        (row(answer="none"), "the answer 'none' is not what the records lead to, which is 'red'"),
        (row(records={"a": {}, "b": {"value": "red"}}), "the answer 'red' is not what the records lead to, which is 'none'"),
    ],
)
def test_what_is_wrong_with_a_row(made, said):
    with pytest.raises(DataError) as caught:
        lookup().task_from_row(made, "data.jsonl:1")
    assert str(caught.value).startswith(said)


async def test_a_web_of_records_without_a_value_does_not_hang():
    """Every record points to all others: there are more ways through it than anyone can count."""
    names = [a + b for a in "abcde" for b in "abcde"]
    web = {name: {"next": [other for other in names if other != name]} for name in names}
    task = lookup().task_from_row({"start": "aa", "records": web, "answer": "none"}, "web/1")
    episode = await play_by_hand(lookup(), task, lookup().gold(task))
    assert episode.outcome == {"answer": 1.0}
    assert len(episode.turn_rewards) == len(names) + 1


async def test_a_task_of_another_environment_is_a_sentence():
    with pytest.raises(DataError, match="task x has no info field 'records'"):
        await lookup().setup(Task(id="x", environment="talk", messages=()))
    with pytest.raises(DataError, match="task x has no answer"):
        await lookup().setup(Task(id="x", environment="lookup", messages=(), info={"start": "a", "records": {"a": {}}}))


# ── words ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=60)
@given(levels, st.integers(0, 10**6), st.lists(st.integers(0, 10**6), max_size=6))
def test_every_message_of_an_episode_can_be_encoded(level, index, picks):
    """Whatever a policy of these words says, the answers are of these words too."""
    environment = lookup(*level, dead_end_share=0.3)
    vocabulary = environment.vocabulary()
    tokenizer = renderer_of(vocabulary).tokenizer
    task = train_task(environment, index)
    moves = [f"lookup({name})" for name in (*task.info["records"], NAMES[index % len(NAMES)])]
    moves += ["".join(vocabulary.words[(pick + step) % len(vocabulary.words)] for step in range(3)) for pick in picks]
    rng = random.Random(index)
    replies = [*rng.sample(moves, len(moves)), *environment.gold(task), *environment.demonstrations(task, rng)]
    replies = sorted((text for text in replies), key=lambda text: text.startswith("answer("))
    episode = asyncio.run(play_by_hand(environment, task, replies))
    assert episode.done
    ours = [message.content for message in episode.transcript if message.role != "assistant"]
    ours += [*environment.gold(task), *environment.demonstrations(task, rng)]
    for text in ours:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_have_one_meaning_each():
    vocabulary = lookup().vocabulary()
    assert len(set(vocabulary.words)) == len(vocabulary.words)
    assert not set(NAMES) & set(VALUES)
    assert vocabulary.copied == {*NAMES, *VALUES}
    tokenizer = renderer_of(vocabulary).tokenizer
    assert all(len(tokenizer.encode(word)) == 1 for word in vocabulary.words)


def test_instructions_have_words_of_their_own():
    with pytest.raises(EnvironmentSetupError, match=r"set environment\.args\.instructions=false"):
        Lookup().vocabulary()
