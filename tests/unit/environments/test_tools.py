"""The environment `tools`, played by hand: functions, the state of a trajectory, answers and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from parts import author_tools
from polyturn.config.load import parse_assignments
from polyturn.environments.base import Reply
from polyturn.environments.builtin.tools import Tools
from polyturn.environments.contract import check_contract, play_by_hand
from polyturn.environments.registry import build_environment
from polyturn.errors import ConfigError, DataError, EnvironmentSetupError
from polyturn.loop.tasks import tasks_from_file
from polyturn.rendering.tool_calls import CALL_FORMATS, call_format
from polyturn.types import Message, Row

HERE = "parts.author_tools"
WRITE = call_format("hermes").write


def row(question="What does the lamp cost?", answer="24", *, system=None, **rest):
    opening = [Message(role="system", content=system)] if system else []
    opening.append(Message(role="user", content=question))
    return Row(where="a.jsonl:1", format="question/answer", messages=tuple(opening), answer=answer, rest=rest)


async def played(environment, task, *replies, truncated=False):
    state = await environment.setup(task)
    steps = []
    for reply in replies:
        steps.append(await environment.step(state, Reply(text=reply, truncated=truncated)))
    outcome = await environment.rewards(state)
    await environment.close(state)
    return steps, outcome


async def test_a_task_with_two_calls_and_an_answer():
    environment = Tools(tools=[f"{HERE}:add", f"{HERE}:price"], exact=True)
    task = environment.task_from_example(row())
    assert task.messages[0].role == "system"
    assert "price" in task.messages[0].content
    assert "The price of an item, in euros." in task.messages[0].content
    reply = WRITE("price", {"item": "lamp"}) + WRITE("add", {"a": 1})
    (called, ended), outcome = await played(environment, task, reply, "24!")
    assert [(message.role, message.content) for message in called.messages] == [("tool", "24"), ("tool", "1")]
    assert called.counts == {"calls": 2}
    assert not called.done
    assert ended.done
    assert outcome == {"answer": 1.0}


async def test_errors_are_read_and_counted_and_end_nothing():
    environment = Tools(tools=[author_tools.price], exact=True)
    task = environment.task_from_example(row())
    bad = [WRITE("price", {"item": "moon"}), WRITE("prize", {"item": "lamp"}), "<tool_call>{"]
    steps, outcome = await played(environment, task, *bad)
    assert [step.messages[0].content.partition(";")[0] for step in steps[:2]] == [
        "error: there is no moon",
        "error: there is no tool 'prize'",
    ]
    assert [dict(step.counts) for step in steps] == [
        {"calls": 1, "tool_error": 1},
        {"calls": 1, "malformed": 1},
        {"calls": 1, "malformed": 1},
    ]
    assert not any(step.done for step in steps)
    assert outcome == {"answer": 0.0}


async def test_a_tool_that_breaks_is_a_fault():
    environment = Tools(tools=f"{HERE}:broken", exact=True)
    with pytest.raises(ConnectionError, match="the shop is closed"):
        await played(environment, environment.task_from_example(row()), WRITE("broken", {}))


@pytest.mark.parametrize(
    ("tag", "reply", "truncated", "given"),
    [
        (None, "<think>is it 3?</think> 24", False, 1.0),
        (None, "24", True, 0.0),
        (None, "It costs 24", False, 0.0),
        ("answer", "So <answer>24</answer>", False, 1.0),
        ("answer", "<answer>3</answer> no, <answer> 24 </answer>", False, 1.0),
        ("answer", "<answer>24</answer> and", True, 1.0),
        ("answer", "<think><answer>24</answer></think>", False, None),
        ("answer", "<answer>24", True, None),
        ("answer", "24", False, None),
        ("answer", "", False, None),
    ],
)
async def test_final_answers(tag, reply, truncated, given):
    environment = Tools(tools=[author_tools.price], exact=True, answer_tag=tag)
    task = environment.task_from_example(row())
    (step,), outcome = await played(environment, task, reply, truncated=truncated)
    if given is None:
        assert not step.done
        assert step.messages[0].content.startswith("error: neither a call nor an answer; give the answer as <answer>")
        assert step.counts == {"no_answer": 1}
    else:
        assert step.done
    assert outcome == {"answer": given or 0.0}


async def test_an_answer_beside_a_call_does_not_count():
    environment = Tools(tools=[author_tools.price], exact=True, answer_tag="answer")
    reply = f"<answer>24</answer>{WRITE('price', {'item': 'lamp'})}"
    (step,), outcome = await played(environment, environment.task_from_example(row()), reply)
    assert not step.done
    assert outcome == {"answer": 0.0}


# ── state ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_each_trajectory_has_its_own_state_and_score():
    environment = Tools(tools=[f"{HERE}:put", f"{HERE}:add"], state=f"{HERE}:make_basket", score=f"{HERE}:full")
    assert environment.scores
    assert not environment.needs_answer
    task = environment.task_from_example(row(answer="lamp"))
    one, other = await environment.setup(task), await environment.setup(task)
    for state, item in ((one, "lamp"), (other, "chair")):
        result = await environment.step(state, Reply(text=WRITE("put", {"item": item})))
        assert [message.content for message in result.messages] == [f'["{item}"]']
    await environment.step(other, Reply(text="done"))
    assert await environment.rewards(one) == {"basket": 1.0, "said": 0.0}
    assert await environment.rewards(other) == {"basket": 0.0, "said": 0.5}


async def test_a_class_is_made_for_each_trajectory_and_closed():
    author_tools.Shop.closed.clear()
    environment = Tools(tools=f"{HERE}:Shop")
    task = environment.task_from_example(row(answer="lamp"))
    assert [spec.name for spec in environment.toolbox.specs] == ["put", "show"]
    assert "its name" in task.messages[0].content
    steps, outcome = await played(environment, task, WRITE("put", {"item": "lamp"}), WRITE("show", {}), "done")
    assert [step.messages[0].content for step in steps[:2]] == ["1 in the basket", '["lamp"]']
    assert outcome == {"score": True}
    _, outcome = await played(environment, task, WRITE("put", {"item": "moon"}), "done")
    assert outcome == {"score": False}
    assert author_tools.Shop.closed == ["lamp", "lamp"]


async def test_demonstrated_calls_are_gold():
    environment = Tools(tools=author_tools.Shop)
    calls = [{"name": "put", "arguments": {"item": "lamp"}}, {"name": "show"}]
    task = environment.task_from_example(row(answer="lamp", calls=calls))
    assert list(environment.gold(task)) == [WRITE("put", {"item": "lamp"}), WRITE("show", {}), "lamp"]
    episode = await play_by_hand(environment, task, environment.gold(task))
    assert (episode.done, episode.score) == (True, 1.0)
    unanswered = environment.task_from_example(dataclasses.replace(row(calls=calls), answer=None))
    assert environment.gold(unanswered)[-1] == "Done."


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("put", "field 'calls' must be a list"),
        ([3], r"calls\[0\] must be an object with name and arguments"),
        ([{"name": "put", "arguments": "lamp"}], r"calls\[0\] must be an object"),
        ([{"name": "show"}, {"name": "putt", "arguments": {}}], r"calls\[1\]: there is no tool 'putt'; did you mean put"),
        ([{"name": "put", "arguments": {}}], r"calls\[0\]: put needs the argument item"),
    ],
)
def test_demonstrated_calls_that_can_not_be(calls, said):
    with pytest.raises(DataError, match=said):
        Tools(tools=author_tools.Shop).task_from_example(row(calls=calls))


# ── what the model is told ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_opening_keeps_the_rows_system_message():
    environment = Tools(tools=[author_tools.add], system="Be brief.", answer_tag="result")
    instructions = call_format("hermes").instructions(environment.toolbox.specs)
    asked = "When you know the answer, reply without a call and give it as <result>...</result>."
    assert environment.task_from_example(row()).messages[0].content == f"Be brief.\n\n{instructions}\n\n{asked}"
    own = environment.task_from_example(row(system="Be kind."))
    assert own.messages[0].content == f"Be kind.\n\n{instructions}\n\n{asked}"
    assert [message.role for message in own.messages] == ["system", "user"]


def test_a_template_that_announces_the_tools():
    environment = Tools(tools=[author_tools.add], announce="template")
    task = environment.task_from_example(row())
    assert [message.role for message in task.messages] == ["user"]
    assert [spec.name for spec in environment.tool_specs(task)] == ["add"]
    assert Tools(tools=[author_tools.add]).tool_specs(task) == ()


@pytest.mark.parametrize("name", CALL_FORMATS)
async def test_calls_in_every_format(name):
    environment = Tools(tools=[author_tools.price, author_tools.add], exact=True, tool_format=name)
    task = environment.task_from_example(row(calls=[{"name": "price", "arguments": {"item": "lamp"}}]))
    assert environment.calls.write("price", {"item": "lamp"}) == environment.gold(task)[0]
    episode = await play_by_hand(environment, task, environment.gold(task))
    assert [message.content for message in episode.transcript if message.role == "tool"] == ["24"]
    assert (episode.done, episode.score) == (True, 1.0)


# ── contract and files ─────────────────────────────────────────────────────────────────────────────────────────────────

FILE = """\
{"question": "What does the lamp cost?", "answer": "24", "calls": [{"name": "price", "arguments": {"item": "lamp"}}]}
{"question": "What does the chair cost?", "answer": "60", "aliases": ["sixty"]}
"""


async def test_rows_of_a_file_keep_the_contract(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(FILE)
    environment = build_environment("tools", parse_assignments([f"tools=[{HERE}:price]", "exact=true"]))
    report = await check_contract(environment, rows=tasks_from_file(str(path), environment))
    assert report.failed == []
    assert len(report.shown.turn_rewards) == 2
    path.write_text(FILE.replace("price", "prize"))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: calls\[0\]: there is no tool 'prize'; did you mean price"):
        tasks_from_file(str(path), environment)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({}, EnvironmentSetupError, "needs environment.args.tools"),
        ({"tools": []}, EnvironmentSetupError, "needs environment.args.tools"),
        ({"tools": ["parts.author_tools:addd"]}, ConfigError, "did you mean add"),
        ({"tools": ["parts.author_tools:unhinted"]}, EnvironmentSetupError, "tool unhinted: parameter item has no type hint"),
        ({"tools": ["parts.author_tools:STOCK"]}, EnvironmentSetupError, "is no function"),
        ({"tools": ["parts.author_tools:put"]}, EnvironmentSetupError, "tool put takes the state of its trajectory"),
        ({"tools": ["parts.author_tools:Shop", "parts.author_tools:add"]}, EnvironmentSetupError, "name it alone"),
        (
            {"tools": "parts.author_tools:Shop", "state": "parts.author_tools:make_basket"},
            EnvironmentSetupError,
            "name it alone",
        ),
        ({"tools": "parts.author_tools:NoTools"}, EnvironmentSetupError, "NoTools has no public methods"),
        ({"tools": [3]}, EnvironmentSetupError, "3 is no dotted path"),
        (
            {"tools": ["parts.author_tools:add"], "exact": True, "score": "parts.author_tools:full"},
            EnvironmentSetupError,
            "two verdicts",
        ),
        (
            {"tools": ["parts.author_tools:add"], "exact": True, "need_answer": False},
            EnvironmentSetupError,
            "leave need_answer",
        ),
        ({"tools": ["parts.author_tools:add"], "score": "parts.author_tools:STOCK"}, EnvironmentSetupError, "can't be called"),
        (
            {"tools": ["parts.author_tools:add"], "state": "builtins:pow"},
            EnvironmentSetupError,
            r"pow is called with \(task\) or less",
        ),
        ({"tools": ["parts.author_tools:add"], "announce": "templat"}, EnvironmentSetupError, "did you mean template"),
        ({"tools": ["parts.author_tools:add"], "answer_tag": "<a>"}, EnvironmentSetupError, "is no tag"),
        ({"tools": ["parts.author_tools:add"], "tool_format": "hermess"}, ConfigError, "did you mean hermes"),
        ({"tools": ["parts.author_tools:add"], "call_deadline_s": 0}, EnvironmentSetupError, "call_deadline_s=0 must be"),
        (
            {"tools": ["parts.author_tools:add"], "mcp": {"url": "http://127.0.0.1:1"}},
            EnvironmentSetupError,
            "takes one of the two",
        ),
    ],
)
def test_arguments_that_are_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        build_environment("tools", arguments)


def test_there_are_no_tasks_without_rows():
    with pytest.raises(EnvironmentSetupError, match=r"set data\.path"):
        Tools(tools=[author_tools.add]).tasks("train", 0)
