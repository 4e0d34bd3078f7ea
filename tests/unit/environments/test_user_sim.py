"""The simulated user: written, scripted, and played by a model behind a real server on this machine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from parts.chat_server import ChatServer
from polyturn.environments.base import Reply
from polyturn.environments.builtin.user_sim import UserSim
from polyturn.environments.contract import check_contract, play_by_hand
from polyturn.environments.registry import build_environment
from polyturn.environments.rewards import chat_api
from polyturn.errors import ConfigError, DataError, DeadlineError, EnvironmentSetupError, ResourceError
from polyturn.loop.tasks import tasks_from_file
from polyturn.types import Message, Row


@pytest.fixture
def server():
    made = ChatServer()
    made.script = ["I fly on Friday.", "Thank you. [END]"]
    yield made
    made.close()


@pytest.fixture
def no_waiting(monkeypatch):
    sleep = asyncio.sleep
    monkeypatch.setattr(chat_api.asyncio, "sleep", lambda seconds: sleep(seconds / 100))


def row(*, where="a.jsonl:1", system=None, opening="Hello, can I change my flight?", **rest: Any) -> Row:
    messages = (Message(role="system", content=system),) if system else ()
    return Row(where=where, format="prompt/answer", messages=(*messages, Message(role="user", content=opening)), rest=rest)


def modelled(server, **options):
    return UserSim(url=server.url, model="m", **options)


async def talk(environment, task, *replies):
    episode = await play_by_hand(environment, task, replies)
    return [message.content for message in episode.transcript if message.role == "user"], episode


# ── written in the row ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_turns_of_a_row_are_said_in_order():
    environment = UserSim()
    task = environment.task_from_example(row(user_turns=["K7PLQ2", "Friday"]))
    said, episode = await talk(environment, task, "Number?", "Day?", "Done.", "never said")
    assert said == ["Hello, can I change my flight?", "K7PLQ2", "Friday"]
    assert episode.done
    assert episode.outcome == {}
    assert [message.role for message in episode.transcript] == ["user", "assistant"] * 3


async def test_a_follow_up_is_the_second_turn():
    environment = UserSim()
    example = Row(
        where="a:1", format="x", messages=(Message(role="user", content="2 + 2?"),), answer="4", follow_up="And 3 + 3?"
    )
    said, episode = await talk(environment, environment.task_from_example(example), "4", "6")
    assert said == ["2 + 2?", "And 3 + 3?"]
    assert episode.done


async def test_the_user_speaks_so_often_and_no_more():
    environment = UserSim(max_user_turns=2)
    task = environment.task_from_example(row(user_turns=["a", "b", "c"]))
    said, episode = await talk(environment, task, "1", "2", "3", "4")
    assert said[1:] == ["a", "b"]
    assert episode.done


@pytest.mark.parametrize("turns", ["one", [1], [""], ["a", " "], {"a": 1}])
def test_turns_that_are_none(turns):
    with pytest.raises(DataError, match="user_turns"):
        UserSim().task_from_example(row(user_turns=turns))


def test_a_system_message_for_the_policy():
    environment = UserSim(system="Be kind.")
    assert environment.task_from_example(row()).messages[0] == Message(role="system", content="Be kind.")
    assert environment.task_from_example(row(system="Be brief.")).messages[0].content == "Be brief."


def test_a_row_may_ask_by_its_turns_alone():
    environment = UserSim(system="Be kind.")
    fields = {"user_turns": ["Hello", "Bye"], "goal": "a chat", "answer": "x"}
    assert environment.knows_row(fields)
    assert not environment.knows_row({**fields, "question": "Hello"})
    task = environment.task_from_row(fields, "a:1")
    assert [message.content for message in task.messages] == ["Be kind.", "Hello"]
    assert task.answer == "x"
    assert task.info == {"user_turns": ["Bye"], "goal": "a chat"}
    for bad in ({"user_turns": []}, {"user_turns": ["a"], "system": 3}, {"user_turns": ["a"], "persona": 3}):
        with pytest.raises(DataError):
            environment.task_from_row(bad, "a:1")
    with pytest.raises(DataError, match="'answer' is missing"):
        UserSim(need_answer=True).task_from_row({"user_turns": ["a"]}, "a:1")


def polite(transcript, task):
    return float(all("please" in message.content for message in transcript if message.role == "assistant"))


async def test_the_contract_with_a_score(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "Hello", "user_turns": ["K7"], "replies": ["Your number, please?", "please wait"]}\n'
        '{"prompt": "Hi", "replies": ["please"]}\n'
    )
    environment = UserSim(score=polite)
    assert environment.scores
    report = await check_contract(environment, rows=tasks_from_file(str(path), environment))
    assert report.failed == []
    with pytest.raises(DataError, match="has no replies to demonstrate"):
        environment.gold(environment.task_from_example(row()))


# ── a function ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def count(state, transcript):
    state.memory["asked"] = state.memory.get("asked", 0) + 1
    said = transcript[-1].content
    return None if said == "bye" else f"{state.memory['asked']}: {said}?"


async def count_later(state, transcript):
    await asyncio.sleep(0)
    return count(state, transcript)


@pytest.mark.parametrize("script", [count, count_later])
async def test_a_script_sees_what_was_said(script):
    environment = UserSim(script=script)
    said, episode = await talk(environment, environment.task_from_example(row()), "blue", "red", "bye")
    assert said[1:] == ["1: blue?", "2: red?"]
    assert episode.done


@pytest.mark.parametrize("value", [3, "", ["a"]])
async def test_a_script_that_says_nothing_proper_is_a_fault(value):
    environment = UserSim(script=lambda state, transcript: value)
    with pytest.raises(EnvironmentSetupError, match="must return a text, or None to end"):
        await talk(environment, environment.task_from_example(row()), "a")


# ── a model ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_model_is_the_user(server):
    environment = modelled(server)
    task = environment.task_from_example(row(system="POLICY RULES", persona="a hurried man", goal="a seat on Friday"))
    said, episode = await talk(environment, task, "<think>SECRET</think>When?", "", "never said")
    assert said == ["Hello, can I change my flight?", "I fly on Friday.", "Thank you."]
    assert episode.done, "the user ended it, with a last word"
    first, second = server.requests
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user", "assistant", "user"]
    system = first["messages"][0]["content"]
    assert "Who you are: a hurried man\nWhat you want: a seat on Friday\n" in system
    assert "[END]" in system
    assert [message["content"] for message in second["messages"][2:]] == [
        "Hello, can I change my flight?",
        "When?",
        "I fly on Friday.",
        "(says nothing)",
    ]
    assert "SECRET" not in str(server.requests)
    assert "POLICY RULES" not in str(server.requests)
    assert first["seed"] == second["seed"]
    assert 0 <= first["seed"] < 2**31
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("m", 256, 0.7)


async def test_the_stop_phrase_alone_ends_without_a_message(server):
    server.script = ["<think>[END]?</think> [END]"]
    said, episode = await talk(modelled(server), modelled(server).task_from_example(row()), "Hi", "never said")
    assert said == ["Hello, can I change my flight?"]
    assert episode.done
    assert len(episode.turn_rewards) == 1


async def test_equal_dialogues_cost_once_and_seeds_follow_the_task(server, tmp_path):
    server.script = ["Friday."]
    environment = modelled(server, cache_dir=str(tmp_path), max_user_turns=1)
    one, other = (environment.task_from_example(row(where=where)) for where in ("a:1", "a:2"))
    await asyncio.gather(*(talk(environment, one, "When?", "ok") for _ in range(4)))
    assert len(server.requests) == 1
    await talk(environment, other, "When?", "ok")
    await talk(environment, one, "Which day?", "ok")
    assert [request["seed"] for request in server.requests].count(server.requests[0]["seed"]) == 2
    later = modelled(server, cache_dir=str(tmp_path), max_user_turns=1)
    await talk(later, one, "When?", "ok")
    assert len(server.requests) == 3, "a later run finds it on disk"
    await talk(modelled(server, cache_dir=str(tmp_path), seed=1), one, "When?")
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("script", "options", "error", "said"),
    [
        ([(500, {}, b"")], {"retries": 1}, ResourceError, "failed 2 times"),
        ([""], {}, ResourceError, "the simulated user m gave no message"),
        (["<think>hm</think>"], {}, ResourceError, "gave no message"),
        (["hang"], {"deadline_s": 0.05}, DeadlineError, "the simulated user of a.jsonl:1"),
        ([(401, {}, b"no key")], {}, EnvironmentSetupError, "refused the request"),
        (["x"], {"max_tokens": 5}, ResourceError, "the simulated user's budget of 5 tokens is used up"),
    ],
)
async def test_an_endpoint_that_fails_is_a_fault(server, no_waiting, script, options, error, said):
    server.script = script
    environment = modelled(server, **options)
    with pytest.raises(error, match=said):
        await talk(environment, environment.task_from_example(row()), "Hi", "Hi again")


async def test_the_model_under_training_can_not_fill_in_the_users_prompt(server):
    server.script = ["[END]"]
    environment = modelled(server)
    await talk(environment, environment.task_from_example(row(persona="{goal}", goal="{stop_phrase}")), "{persona}")
    assert "Who you are: {goal}\nWhat you want: {stop_phrase}\n" in server.requests[0]["messages"][0]["content"]
    assert server.requests[0]["messages"][-1]["content"] == "{persona}"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"script": "parts.author_tools:put", "url": "http://127.0.0.1:1", "model": "m"}, EnvironmentSetupError, "two users"),
        ({"url": "http://127.0.0.1:1"}, EnvironmentSetupError, r"url needs environment\.args\.model"),
        ({"model": "m"}, EnvironmentSetupError, r"model needs environment\.args\.url"),
        ({"url": "127.0.0.1", "model": "m"}, EnvironmentSetupError, "is no base of an API"),
        ({"url": "http://127.0.0.1:1", "model": "m", "retries": 1, "deadline_s": 0}, EnvironmentSetupError, "deadline_s=0"),
        (
            {"url": "http://127.0.0.1:1", "model": "m", "api_key_env": "POLYTURN_NOT_SET"},
            EnvironmentSetupError,
            "simulated user's key",
        ),
        ({"max_user_turns": 0}, EnvironmentSetupError, "max_user_turns=0"),
        ({"max_user_turns": 1.5}, EnvironmentSetupError, "max_user_turns=1.5"),
        ({"stop_phrase": " "}, EnvironmentSetupError, "stop_phrase is empty"),
        ({"script": "parts.author_tools:ad"}, ConfigError, "did you mean add"),
        ({"script": "parts.author_tools:STOCK"}, EnvironmentSetupError, "can't be called"),
        ({"script": "parts.author_tools:price"}, EnvironmentSetupError, r"must take \(state, transcript\)"),
        ({"score": "parts.author_tools:price"}, EnvironmentSetupError, r"must take \(transcript, task\)"),
    ],
)
def test_arguments_that_are_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        build_environment("user_sim", arguments)


async def test_steps_count_the_users_turns():
    environment = UserSim()
    task = environment.task_from_example(row(user_turns=["a"]))
    state = await environment.setup(task)
    assert (await environment.step(state, Reply(text="x"))).counts == {"user_turns": 1}
    assert (await environment.step(state, Reply(text="x"))).counts == {}
    with pytest.raises(EnvironmentSetupError, match="takes its openings from rows"):
        environment.tasks("train", 0)
