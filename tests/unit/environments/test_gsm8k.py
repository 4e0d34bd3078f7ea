"""gsm8k: rows and what is wrong with them, answers, calls, rewards, states."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest

from polyturn.environments.base import Reply
from polyturn.environments.builtin.gsm8k import MAX_CALLS, Gsm8k
from polyturn.environments.contract import play_by_hand
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.loop.tasks import tasks_from_file
from polyturn.rendering.tool_calls import CALL_FORMATS, call_format

HERMES = call_format("hermes")
ROWS = Path(__file__).parents[2] / "data" / "gsm8k_50.jsonl"
CLIPS = {
    "question": " Natalia sold 48 clips in April and half as many in May. How many altogether? ",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nShe sold 48+24 = <<48+24=72>>72 altogether.\n#### 72",
}


def call(expression: str, name: str = "calculator") -> str:
    return HERMES.write(name, {"expression": expression})


def task(environment: Gsm8k, **changes):
    return environment.task_from_row(CLIPS | changes, "rows.jsonl:1")


async def outcome(environment: Gsm8k, *replies: Reply | str, answer: str = "72") -> dict[str, float]:
    """The reward components after `replies`, and whether the environment was done: `done`."""
    state = await environment.setup(task(environment, answer=f"#### {answer}"))
    result = None
    for reply in replies:
        result = await environment.step(state, reply if isinstance(reply, Reply) else Reply(text=reply))
    assert result is not None
    return {**await environment.rewards(state), "done": result.done}


# ── rows ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_becomes_a_task():
    made = task(Gsm8k())
    system, user = made.messages
    assert (system.role, user.role) == ("system", "user")
    assert "#### NUMBER" in system.content
    assert "tool_call" not in system.content
    assert user.content == "Natalia sold 48 clips in April and half as many in May. How many altogether?"
    assert (made.id, made.environment, made.answer) == ("rows.jsonl:1", "gsm8k", "72")


def test_the_instructions_show_a_call_that_works():
    (system, _) = task(Gsm8k(tool="calculator")).messages
    (shown,) = HERMES.parse(system.content).calls
    assert shown.name == "calculator"
    assert task(Gsm8k(tool="calculator", instructions=False)).messages[0].role == "user"


def test_the_instructions_have_not_changed():
    """Recorded rollouts start with them."""
    (system, _) = task(Gsm8k(tool="calculator")).messages
    assert system.content == (
        "Solve the problem step by step. You have a calculator. To use it, reply with a call like\n"
        '<tool_call>{"name": "calculator", "arguments": {"expression": "3 * (4 + 5)"}}</tool_call>\n'
        "and wait for its result. It knows + - * / // % ** and brackets. When you know the answer, don't call. "
        "End with the answer alone on the last line, as #### NUMBER."
    )


@pytest.mark.parametrize("tool_format", CALL_FORMATS)
async def test_every_format_of_calls(tool_format):
    environment = Gsm8k(tool="calculator", tool_format=tool_format, examples=1)
    made = task(environment)
    shown = environment.calls.parse(made.messages[0].content).calls
    assert [call.arguments for call in shown] == [{"expression": "3 * (4 + 5)"}]
    assert environment.calls.parse(made.messages[2].content).calls[0].name == "calculator"
    played = await play_by_hand(environment, made, environment.gold(made))
    assert (played.done, played.outcome) == (True, {"answer": 1.0})
    assert [message.content for message in played.transcript if message.role == "tool"][-1] == "48/2 = 24"


@pytest.mark.parametrize("tool", ["none", "calculator"])
@pytest.mark.parametrize("examples", [1, 2])
async def test_the_examples_are_right(tool, examples):
    """Each one, played as a task of its own, scores full marks and gets the tool's answer that it shows."""
    environment = Gsm8k(tool=tool, examples=examples)
    shown = list(task(environment).messages[1:-1])
    assert [message.role for message in shown].count("user") == examples
    while shown:
        question = shown.pop(0)
        replies, tools = [], []
        while shown and shown[0].role != "user":
            message = shown.pop(0)
            (replies if message.role == "assistant" else tools).append(message)
        marked = replies[-1].content.rpartition("####")[2]
        alone = Gsm8k(tool=tool).task_from_row({"question": question.content, "answer": f"####{marked}"}, "x")
        played = await play_by_hand(Gsm8k(tool=tool), alone, [reply.content for reply in replies])
        assert played.done
        assert played.outcome == {"answer": 1.0}
        assert [message for message in played.transcript if message.role == "tool"] == tools


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"question": None},
            "field 'question' is missing; a gsm8k row needs question and answer, and this row has answer, quest",
        ),
        ({"question": "  "}, "field 'question' is empty"),
        ({"question": 7}, "field 'question' is a int"),
        ({"answer": None}, "field 'answer' is missing"),
        ({"answer": 72}, "field 'answer' is a int"),
        ({"answer": "It is 72"}, "field 'answer' has no ####; its last line must be #### NUMBER"),
        ({"answer": "It is 72\n#### "}, "nothing follows ####"),
        ({"answer": "#### twelve"}, "'twelve' after #### is no number"),
        ({"answer": "#### 5 or 6"}, "'5 or 6' after #### is no number"),
    ],
)
def test_rows_that_are_refused(changes, said):
    with pytest.raises(DataError) as caught:
        task(Gsm8k(), **changes)
    assert said in str(caught.value)


def test_every_bad_row_is_named_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [CLIPS, {"question": "a"}, CLIPS, CLIPS | {"answer": "72"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError) as caught:
        tasks_from_file(str(path), Gsm8k())
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{path}:2: field 'answer' is missing")
    assert second.startswith(f"{path}:4: field 'answer' has no ####")


def test_a_decimal_comma_is_read_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        task(Gsm8k(), answer="#### 1,080")
        assert caplog.text == ""
        task(Gsm8k(), answer="#### 3,5")
    assert "rows.jsonl:1: '3,5' could mean two numbers" in caplog.text


def test_the_last_mark_is_the_answer():
    assert task(Gsm8k(), answer="#### 5\nNo.\n####6").answer == "6"


def test_without_rows_there_are_no_tasks():
    with pytest.raises(EnvironmentSetupError, match=r"set data.path .* `polyturn env check gsm8k` takes --data"):
        Gsm8k().tasks("train", 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tool": "calculater"}, "did you mean calculator?"),
        ({"tool_format": "hermis"}, "environment.args.tool_format='hermis' is no format of calls; did you mean hermes?"),
        ({"format_reward": 1.0}, "must be less than the 1 of a right answer"),
        ({"format_reward": -0.1}, "use 0 to 0.9"),
        ({"turn_reward": -1.0, "tool": "calculator"}, "is no reward"),
        ({"turn_reward": float("nan"), "tool": "calculator"}, "is no reward"),
        ({"turn_reward": 0.1}, "there are none with tool=none; use tool=calculator"),
        ({"examples": 3}, "use 0 to 2 worked examples"),
    ],
)
def test_arguments_that_are_refused(arguments, said):
    with pytest.raises(EnvironmentSetupError) as caught:
        Gsm8k(**arguments)
    assert said in str(caught.value)


# ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("reply", "right", "marked"),
    [
        ("48 + 24 = 72\n#### 72", True, True),
        ("#### 72", True, True),
        ("####72", True, True),
        ("#### $72.00\nIs that right?", True, True),
        ("#### 72 clips", True, True),
        ("**#### 72**", True, True),
        ("so \\boxed{72}", True, True),
        ("#### \\boxed{72}", True, True),
        ("#### x = 72", True, True),
        ("#### 71\n#### 72", True, True),
        ("#### 72\n#### 71", False, True),
        ("#### 71", False, True),
        ("#### 71 or 72", False, False),
        ("\\boxed{71}\n#### 72", True, True),
        # no mark, or one that is not one
        ("It is 72", False, False),
        ("", False, False),
        ("#### NUMBER", False, False),
        ("#### Step 1\nIt is 72", False, False),
        ('Put it after "#### NUMBER" 72', False, False),
        ("so #### 72", False, False),
        ("#### seventy-two", False, False),
        ("\\boxed{?}", False, False),
    ],
)
async def test_answers_in_one_turn(reply, right, marked):
    found = await outcome(Gsm8k(format_reward=0.2), reply)
    assert found == {"answer": float(right), "format": 0.2 * marked, "done": True}


@pytest.mark.parametrize(
    ("text", "right"),
    [("#### 72\nWait", True), ("#### 7", False), ("#### 72", False), ("\\boxed{72} so", True), ("72", False)],
)
async def test_half_an_answer_is_none(text, right):
    environment = Gsm8k(accept_unmarked=True)
    assert (await outcome(environment, Reply(text=text, truncated=True)))["answer"] == float(right)


@pytest.mark.parametrize(("reply", "right"), [("So it is 72.", True), ("72 of 80", False), ("no idea", False), ("", False)])
async def test_an_answer_without_its_mark(reply, right):
    found = await outcome(Gsm8k(accept_unmarked=True, format_reward=0.2), reply)
    assert found == {"answer": float(right), "format": 0.0, "done": True}


async def test_the_form_alone_is_no_success():
    found = await outcome(Gsm8k(format_reward=0.9), "#### 1")
    assert found["answer"] + found["format"] < Gsm8k.full_marks


async def test_silence_scores_nothing():
    environment = Gsm8k(tool="calculator", format_reward=0.2)
    state = await environment.setup(task(environment))
    assert await environment.rewards(state) == {"answer": 0.0, "format": 0.0}


# ── the calculator ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def step(environment: Gsm8k, text: str, **options: bool):
    return await environment.step(await environment.setup(task(environment)), Reply(text=text, **options))


async def test_a_call_gets_its_result_and_the_trajectory_goes_on():
    result = await step(Gsm8k(tool="calculator", turn_reward=0.1), f"Half of it: {call('48 / 2')}")
    (message,) = result.messages
    assert (message.role, message.content) == ("tool", "48 / 2 = 24")
    assert (result.done, result.reward, result.counts) == (False, 0.1, {"calls": 1})


async def test_calls_come_before_an_answer_in_the_same_reply():
    """The model has not seen the result of its call yet, so what it says after it is a guess."""
    found = await outcome(Gsm8k(tool="calculator"), f"{call('48/2')}\n#### 72")
    assert found == {"answer": 0.0, "done": False}


@pytest.mark.parametrize(
    ("text", "said", "counted"),
    [
        (call("1/0"), "1/0: error: division by zero", "calculator_error"),
        (call("2 clips"), "2 clips: error: 'c' is not allowed", "calculator_error"),
        (call("1" * 300), "1111111111111111111111111111111111111111...: error: the expression is longer", "calculator_error"),
        (call("1+1", name="python"), "error: there is no tool 'python'; the tool is calculator", "malformed"),
        (HERMES.write("calculator", {"expr": "1"}), "error: calculator needs the argument expression", "malformed"),
        (HERMES.write("calculator", {"expression": 5}), "error: calculator needs the argument expression", "malformed"),
        ("<tool_call>{</tool_call>", "error: the call is not valid JSON", "malformed"),
        ("I think it is 72", "error: neither a call of the calculator nor an answer", "malformed"),
        ("", "error: neither a call of the calculator nor an answer", "malformed"),
    ],
)
async def test_what_goes_wrong_is_an_observation_that_counts_and_pays_nothing(text, said, counted):
    result = await step(Gsm8k(tool="calculator", turn_reward=0.1), text)
    (message,) = result.messages
    assert message.content.startswith(said)
    assert (result.done, result.reward, result.counts[counted]) == (False, 0.0, 1)


async def test_half_a_call_is_not_run():
    whole = call("48/2")
    result = await step(Gsm8k(tool="calculator"), whole + whole[:-3], truncated=True)
    assert [message.content for message in result.messages] == ["48/2 = 24", "error: the call was cut off before </tool_call>"]
    assert result.counts == {"calls": 2, "malformed": 1}


async def test_a_turn_is_paid_once_and_only_for_something_new():
    environment = Gsm8k(tool="calculator", turn_reward=0.1)
    state = await environment.setup(task(environment))

    async def reward(*expressions: str) -> float:
        return (await environment.step(state, Reply(text="".join(map(call, expressions))))).reward

    assert await reward("48/2", "48+24", "1+1") == 0.1
    assert await reward("48 / 2") == 0.0, "white space makes no new calculation"
    assert await reward("72") == 0.0, "a number is no calculation"
    assert await reward("48/2", "2+2") == 0.1


async def test_a_flood_of_calls_is_cut():
    result = await step(Gsm8k(tool="calculator"), "".join(call(f"1+{k}") for k in range(MAX_CALLS + 3)))
    assert len(result.messages) == MAX_CALLS + 1
    assert result.messages[-1].content == f"error: only the first {MAX_CALLS} calls of a reply are run"
    assert result.counts["calls"] == MAX_CALLS


async def test_the_state_is_what_was_computed_before_the_turn():
    environment = Gsm8k(tool="calculator")

    async def keys(*replies: str) -> list[str | None]:
        state = await environment.setup(task(environment))
        return [(await environment.step(state, Reply(text=reply))).state_key for reply in replies]

    one = await keys(call("48/2"), "hm", call("48+24"), "#### 72")
    other = await keys(call("48+24"), call("48 / 2"), call("oops"), "#### 72")
    assert one[0] == other[0] == ""
    assert one[1] == one[2] == "48/2=24"
    assert other[1] == "48+24=72"
    assert one[3] == other[2] == other[3] == "48+24=72; 48/2=24", "the order does not matter"
    assert await keys("x", "y") == ["", ""]


async def test_without_the_tool_calls_are_text():
    assert await outcome(Gsm8k(), f"{call('48/2')}\n#### 72") == {"answer": 1.0, "done": True}


# ── gold and demonstrations, on real rows ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tool", ["none", "calculator"])
async def test_gold_and_demonstrations_of_real_rows_score_full_marks(tool):
    environment = Gsm8k(tool=tool, format_reward=0.1)
    source = tasks_from_file(str(ROWS), environment)
    assert source.size == 50
    calls = 0
    for index in range(source.size):
        made = source[index]
        for replies in (environment.gold(made), environment.demonstrations(made, random.Random(index))):
            assert "<<" not in "".join(replies)
            played = await play_by_hand(environment, made, replies)
            assert (played.done, played.outcome) == (True, {"answer": 1.0, "format": 0.1}), made.id
            calls += len(replies) - 1
    assert calls == 0 if tool == "none" else calls > 80


def test_gold_calls_one_of_the_rows_own_calculations():
    environment = Gsm8k(tool="calculator")
    first, last = environment.gold(task(environment))
    assert first == call("48/2")
    assert last == "She sold 48/2 = 24 in May.\nShe sold 48+24 = 72 altogether.\n#### 72"
    shown = {environment.demonstrations(task(environment), random.Random(seed))[0] for seed in range(20)}
    assert shown == {call("48/2"), call("48+24")}


def test_a_calculation_that_the_calculator_disagrees_with_is_not_shown():
    environment = Gsm8k(tool="calculator")
    wrong = "a <<2+2=5>>5 b <<x*2=4>>4 c <<1,000+1=1,001>>1001\n#### 1001"
    assert environment.gold(task(environment, answer=wrong))[0] == call("1,000+1")
    assert len(environment.gold(task(environment, answer="a <<2+2=5>>5\n#### 5"))) == 1
