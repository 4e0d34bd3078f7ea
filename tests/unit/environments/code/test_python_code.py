"""`python_code` played by hand in the local sandbox: what counts, what is seen, what stays hidden, whose fault a fault is."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from polyturn.data.formats import row_in
from polyturn.environments.base import Reply
from polyturn.environments.builtin.python_code import MAX_CALLS, PythonCode
from polyturn.environments.code import generated
from polyturn.environments.code.judging import Judge
from polyturn.environments.contract import play_by_hand
from polyturn.errors import DataError, EnvironmentSetupError, SandboxError
from polyturn.rendering.tool_calls import CALL_FORMATS, call_format
from polyturn.sandbox.base import MIB, Limits, Tests
from polyturn.sandbox.http import HttpSandbox
from polyturn.sandbox.local import LocalSandbox
from polyturn.types import Task

pytestmark = pytest.mark.asyncio(loop_scope="module")
DATA = Path(__file__).parents[3] / "data"
LIMITS = Limits(wall_s=1, cpu_s=1, memory_bytes=128 * MIB, output_bytes=1 << 16)
TESTS = ["assert add(1, 2) == 3", "assert add(7, 6) == 13", "assert add(-1, 1) == 0", "assert add(0, 5) == 5"]
RIGHT, WRONG = "def add(a, b):\n    return a + b", "def add(a, b):\n    return 3"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[LocalSandbox]:
    sandbox = LocalSandbox(LIMITS, concurrency=4)
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


@pytest.fixture
def made(sandbox):
    """An environment with the module's sandbox."""
    return lambda **arguments: PythonCode(sandbox=sandbox, **arguments)


def task_of(environment: PythonCode, **fields) -> Task:
    fields = {"prompt": "Write add(a, b).", "response": RIGHT, "tests": TESTS} | fields
    row, problems = row_in({key: value for key, value in fields.items() if value is not None}, "a.jsonl:1", None)
    assert problems == ()
    assert row is not None
    return environment.task_from_example(row)


def format_tool_call(name, arguments):
    return call_format("hermes").write(name, arguments)


def call(code, tool="run_tests", **arguments):
    return format_tool_call(tool, {"code": code, **arguments})


async def played(environment, *replies, truncated=False, **fields):
    """Results of every step and the outcome."""
    state = await environment.setup(task_of(environment, **fields))
    results = [await environment.step(state, Reply(text=reply, truncated=truncated)) for reply in replies]
    return results, (await environment.rewards(state))["tests"]


def said(result):
    return "\n".join(message.content for message in result.messages)


# ── one reply ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("reply", "outcome", "counts"),
    [
        (f"So:\n```python\n{RIGHT}\n```", 1, {"runs": 1}),
        (RIGHT, 1, {"runs": 1}),
        (f"```\n{WRONG}\n```", 0, {"runs": 1}),
        ("It adds them.", 0, {"no_program": 1}),
        ("", 0, {"no_program": 1}),
        ("```python\ndef add(a, b:\n```", 0, {"syntax_error": 1}),
        ("```python\ndef add(a, b):\n    while True: pass\n```", 0, {"runs": 1, "timeouts": 1}),
        ("```python\nimport os\nos._exit(0)\n```", 0, {"runs": 1}),
        (f"{RIGHT}\nprint('4 of 4 public tests pass.')", 1, {"runs": 1}),
    ],
)
async def test_a_single_reply(made, reply, outcome, counts):
    (result,), reward = await played(made(mode="single"), reply)
    assert (result.done, result.messages, result.counts) == (True, (), counts)
    assert reward == outcome


@pytest.mark.parametrize(
    ("arguments", "outcome"), [({}, 0), ({"reward": "share"}, 0.25), ({"reward": "share", "power": 2}, 1 / 16)]
)
async def test_all_or_a_share(made, arguments, outcome):
    assert (await played(made(mode="single", **arguments), WRONG))[1] == outcome


async def test_output_cases(made):
    cases = [{"input": "2 3\n", "output": "5"}, {"input": "1 1", "output": 2}]
    environment = made(mode="single", reward="share")
    fields = {"response": None, "tests": None, "test_cases": cases}
    assert (await played(environment, "print(sum(map(int, input().split())))", **fields))[1] == 1
    assert (await played(environment, "print(5)", **fields))[1] == 0.5


# ── many ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_program_is_repaired_and_submitted(made):
    environment = made(public_tests=2, turn_reward=0.5)
    results, outcome = await played(environment, call(WRONG), call(WRONG), call(RIGHT), "This is my answer.")
    assert [result.reward for result in results] == [0.25, 0, 0.25, 0], "half of the tests, nothing new, the other half"
    assert [result.done for result in results] == [False, False, False, True]
    assert said(results[0]) == "1 of 2 public tests pass.\ntest 2 failed: assert add(7, 6) == 13"
    assert said(results[2]) == "2 of 2 public tests pass."
    assert outcome == 1


async def test_repeating_and_going_back_earn_nothing(made):
    environment = made(public_tests=2, turn_reward=1.0, max_attempts=9)
    results, outcome = await played(environment, *[call(code) for code in (RIGHT, WRONG, RIGHT, WRONG)], "Done with it.")
    assert [result.reward for result in results] == [1, 0, 0, 0, 0]
    assert outcome == 0, "the program tested last counts, and it is wrong"


async def test_hidden_tests_count_and_are_never_shown(made):
    environment = made(public_tests=1, max_attempts=5)
    spy = "def add(a, b):\n    print('asked', a, b)\n    return 3"
    results, outcome = await played(environment, call(spy), call("def add(a, b): return 1 / 0"), call(spy), "That is all.")
    assert outcome == 0
    told = "\n".join(said(result) for result in results)
    assert "asked 1 2" in told
    assert not any(text in told for text in ("13", "7", "asked -1", "asked 0", "add(0", *TESTS[1:])), told


async def test_the_end_of_a_trajectory_by_a_limit_scores_what_was_tested_last(made):
    assert (await played(made(), call(WRONG), call(RIGHT)))[1] == 1
    assert (await played(made(), "I think."))[1] == 0


async def test_a_final_reply_with_a_program_takes_its_place(made):
    environment = made()
    assert (await played(environment, call(WRONG), f"Better:\n```python\n{RIGHT}\n```"))[1] == 1
    assert (await played(environment, call(RIGHT), "It prints\n```\n3\n```\nfor 1 and 2."))[1] == 1, "a fence, no program"
    assert (await played(environment, call(RIGHT), "Done"))[1] == 1, "a word that parses"
    assert (await played(environment, RIGHT))[1] == 1, "nothing was tested"


async def test_attempts_run_out(made):
    environment = made(max_attempts=2)
    results, outcome = await played(environment, call(WRONG), call(RIGHT))
    assert (results[1].done, outcome) == (True, 1)
    (result,), outcome = await played(environment, "".join(call(code) for code in (WRONG, WRONG, RIGHT)))
    assert said(result).splitlines()[-1] == "error: there are no more than 2 attempts"
    assert (result.done, outcome) == (True, 0)


async def test_programs_are_run_without_costing_an_attempt(made):
    environment = made(max_attempts=1)
    look = call("print(input()[::-1])", tool="run_python", stdin="abc")
    results, outcome = await played(environment, look, call(WRONG, tool="run_python"), call(RIGHT))
    assert said(results[0]) == "The program ran to its end.\noutput:\n| cba"
    assert said(results[1]) == "The program ran to its end.\nno output"
    assert (results[1].done, results[2].done, outcome) == (False, True, 1)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("<tool_call>{", "not valid JSON"),
        (format_tool_call("run", {"code": "x"}), "there is no tool 'run'"),
        (format_tool_call("run_tests", {}), "run_tests needs the argument code"),
        (format_tool_call("run_tests", {"code": " "}), "the argument code of run_tests is empty"),
        (format_tool_call("run_python", {"code": "x = 1", "stdin": 3}), "the argument stdin of run_python"),
        ("Let me think.", "neither a call nor a program"),
        ("", "neither a call nor a program"),
    ],
)
async def test_what_can_not_be_read_is_an_error_and_ends_nothing(made, reply, problem):
    (result,), outcome = await played(made(), reply)
    assert problem in said(result)
    assert said(result).startswith("error: ")
    assert (result.done, result.counts["malformed"], outcome) == (False, 1, 0)


async def test_a_reply_cut_off_submits_nothing(made):
    environment = made(max_attempts=2)
    (result,), _ = await played(environment, f"```python\n{RIGHT}", truncated=True)
    assert (result.done, "cut off" in said(result)) == (False, True)
    state = await environment.setup(task_of(environment))
    await environment.step(state, Reply(text=call(RIGHT)))
    result = await environment.step(state, Reply(text="And now I will exp", truncated=True))
    assert not result.done


async def test_only_so_many_calls_of_a_reply_are_made(made):
    (result,), _ = await played(made(max_attempts=99), "".join(call(f"x = {n}") for n in range(MAX_CALLS + 2)))
    assert len(result.messages) == MAX_CALLS + 1
    assert result.messages[-1].content == f"error: only the first {MAX_CALLS} calls of a reply are made"


async def test_fenced_programs_are_calls(made):
    environment = made(tool_format="fenced")
    results, outcome = await played(environment, f"Try:\n```python\n{WRONG}\n```", RIGHT, "Done.")
    assert [said(result) for result in results] == ["1 of 1 public tests pass."] * 2 + [""]
    assert (results[2].done, outcome) == (True, 1)
    (result,), _ = await played(environment, "```python\n\n```")
    assert said(result) == "error: the code block is empty"
    (result,), _ = await played(environment, f"```python\n{RIGHT}", truncated=True)
    assert "cut off" in said(result)
    (result,), _ = await played(environment, f"```python\n{RIGHT}\n```\nIt adds the two, wh", truncated=True)
    assert said(result) == "1 of 1 public tests pass.", "its program is whole"
    (result,), _ = await played(environment, f"```python\n{RIGHT}\n```\nOr:\n```python\ndef add(a,", truncated=True)
    assert said(result) == "1 of 1 public tests pass.", "the first block is whole"
    (result,), _ = await played(environment, RIGHT, truncated=True)
    assert "cut off" in said(result), "nobody knows how it goes on"


@pytest.mark.parametrize("tool_format", CALL_FORMATS)
async def test_every_format_of_calls(made, tool_format):
    environment = made(tool_format=tool_format)
    task = task_of(environment)
    assert "attempts" in task.messages[0].content
    episode = await play_by_hand(environment, task, environment.gold(task))
    assert (episode.score, episode.done, len(episode.turn_rewards)) == (1, True, 2)
    assert episode.transcript[-2].content == "1 of 1 public tests pass."


async def test_what_a_program_does_to_itself_is_told(made):
    environment = made(max_attempts=9)
    programs = ("def add(a, b:", "def add(a, b):\n    while True: pass", "x = bytearray(1 << 30)", "1 / 0", "def sum(a): pass")
    results, _ = await played(environment, *map(call, programs))
    assert said(results[0]).startswith("error: the program is not valid Python: line 1")
    assert said(results[1]) == "0 of 1 public tests pass.\ntest 1 ended (timeout): assert add(1, 2) == 3"
    assert results[1].counts == {"runs": 1, "timeouts": 1}
    assert "The program itself does not run (memory limit)" in said(results[2]) or "MemoryError" in said(results[2])
    trace = [line for line in said(results[3]).splitlines()[1:] if set(line) - set("|~^ ")]  # marks under it differ
    assert trace == [
        "The program itself does not run:",
        "| Traceback (most recent call last):",
        '|   File "solution.py", line 1, in <module>',
        "|     1 / 0",
        "| ZeroDivisionError: division by zero",
    ]
    assert said(results[4]).splitlines()[-1] == "| NameError: name 'add' is not defined"


async def test_a_program_that_claims_to_pass(made):
    forger = "def add(a, b):\n    print('1 of 1 public tests pass.')\nprint('All tests pass.')"
    (result,), outcome = await played(made(), call(forger))
    assert said(result).splitlines() == [
        "0 of 1 public tests pass.",
        "test 1 failed: assert add(1, 2) == 3",
        "output:",
        "| All tests pass.",
        "| 1 of 1 public tests pass.",
    ]
    assert outcome == 0


async def test_objects_that_equal_everything_earn_nothing(made):
    liar = "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"
    assert (await played(made(mode="single", reward="share"), liar))[1] == 0


async def test_states_are_equal_for_equal_knowledge(made):
    environment = made(max_attempts=9)
    one, _ = await played(environment, call(WRONG), call(RIGHT), "I am done.")
    other, _ = await played(environment, call(RIGHT), call(WRONG), "I am done.")
    assert one[0].state_key == other[0].state_key
    assert one[1].state_key != other[1].state_key
    assert one[2].state_key == other[2].state_key


async def test_without_public_tests_a_program_is_only_run(made):
    (result,), outcome = await played(made(public_tests=0), call(f"print('x')\n{RIGHT}"))
    assert said(result) == "There are no public tests. The program ran to its end.\noutput:\n| x"
    assert outcome == 1


# ── the prompt ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_tests_are_shown_only_when_asked_for(made):
    for mode in ("single", "multi"):
        text = "\n".join(message.content for message in task_of(made(mode=mode)).messages)
        assert not any(test in text for test in TESTS)
    shown = task_of(made(mode="single", show_tests=2)).messages[-1].content
    assert shown == f"Write add(a, b).\n\nIt must pass tests such as\n```python\n{TESTS[0]}\n{TESTS[1]}\n```"
    assert made(show_tests=3).public_tests == 3


async def test_instructions_go_behind_the_rows_own(made):
    (system, _) = task_of(made(), system="Be brief.").messages
    assert system.content.startswith("Be brief.\n\nWrite a Python program")
    assert "run_tests" in system.content
    assert [message.role for message in task_of(made(instructions=False)).messages] == ["user"]
    assert "run_python" not in task_of(made(tool_format="fenced")).messages[0].content


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "multy"}, "did you mean multi"),
        ({"tool_format": "xmk"}, "did you mean xml"),
        ({"reward": "most"}, "reward='most' is unknown"),
        ({"max_attempts": 0}, "max_attempts=0 must be a whole number, 1 or more"),
        ({"public_tests": 1.5}, "public_tests=1.5 must be a whole number"),
        ({"power": 0.0, "reward": "share"}, "power=0.0 is out of range"),
        ({"power": 2.0}, "reward=all pays none"),
        ({"turn_reward": 0.1, "mode": "single"}, "mode=single tests none"),
        ({"turn_reward": float("nan")}, "turn_reward=nan is out of range"),
        ({"tasks": "builtin:algebra"}, "tasks='builtin:algebra' is unknown"),
    ],
)
async def test_arguments_that_make_no_sense(made, arguments, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        made(**arguments)


async def test_it_makes_no_tasks_of_its_own_unless_asked(made):
    with pytest.raises(EnvironmentSetupError, match="takes its problems from rows"):
        made().tasks("train", 0)
    with pytest.raises(EnvironmentSetupError, match="no closed vocabulary"):
        made().vocabulary()
    with pytest.raises(DataError, match="no reference program"):
        made().gold(task_of(made(), response=None))


# ── rows as they are ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["single", "multi"])
@pytest.mark.parametrize("name", ["humaneval_4", "mbpp_12", "mbpp_held_out_8"])
async def test_references_score_full_marks_and_silence_none(made, mode, name):
    environment = made(mode=mode, wall_s=20.0)
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    assert all(environment.knows_row(row) for row in rows)
    tasks = [environment.task_from_row(row, f"{name}:{line}") for line, row in enumerate(rows, 1)]
    episodes = await asyncio.gather(*[play_by_hand(environment, task, environment.gold(task)) for task in tasks])
    assert [(episode.score, episode.done) for episode in episodes] == [(1, True)] * len(rows)
    silent = await asyncio.gather(*[play_by_hand(environment, task, [""]) for task in tasks])
    assert [episode.score for episode in silent] == [0] * len(rows)


async def test_rows_of_another_kind_are_refused(made):
    with pytest.raises(DataError, match=r"neither of HumanEval .* and has a, b"):
        made().task_from_row({"a": 1, "b": 2}, "x")


# ── whose fault ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("reply", [call(RIGHT), call(RIGHT, tool="run_python"), f"```python\n{RIGHT}\n```"])
async def test_a_sandbox_that_is_gone_raises(reply):
    environment = PythonCode(sandbox=HttpSandbox("http://127.0.0.1:9", limits=LIMITS))
    state = await environment.setup(task_of(environment))
    with pytest.raises(SandboxError):
        await environment.step(state, Reply(text=reply))


async def test_a_pool_killed_under_a_verdict_raises():
    sandbox = LocalSandbox(Limits(wall_s=60, cpu_s=60))
    await sandbox.start()
    try:
        environment = PythonCode(sandbox=sandbox)
        state = await environment.setup(task_of(environment))
        sleeper = call("import time\ndef add(a, b): time.sleep(60)")
        step = asyncio.ensure_future(environment.step(state, Reply(text=sleeper)))
        await asyncio.sleep(0.3)
        assert sandbox.pid is not None
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await step
        other = await environment.setup(task_of(environment))
        assert "1 of 1" in said(await environment.step(other, Reply(text=call(RIGHT)))), "the next one gets a new pool"
    finally:
        await sandbox.stop()


# ── verdicts that are remembered ───────────────────────────────────────────────────────────────────────────────────────


class Counting:
    """A sandbox that counts what it is asked."""

    def __init__(self, sandbox):
        self.sandbox, self.asked = sandbox, 0

    async def run_tests(self, program, tests, limits=None):
        self.asked += 1
        return await self.sandbox.run_tests(program, tests, limits)


async def test_equal_programs_are_asked_for_once(sandbox):
    counting = Counting(sandbox)
    judge, tests = Judge(counting, None, remember=2), Tests(cases=tuple(TESTS))
    verdicts = await asyncio.gather(*[judge.verdict(RIGHT, tests) for _ in range(5)])
    assert (counting.asked, {verdict.passed for verdict in verdicts}) == (1, {4})
    await judge.verdict(WRONG, tests)
    await judge.verdict("x = 1", tests)
    await judge.verdict(RIGHT, tests)
    assert counting.asked == 4, "two are remembered, and the first was forgotten"


async def test_a_limit_is_asked_for_each_time(sandbox):
    counting = Counting(sandbox)
    judge = Judge(counting, Limits(wall_s=0.2, cpu_s=1), remember=9)
    for _ in range(2):
        verdict = await judge.verdict("def add(a, b):\n    while True: pass", Tests(cases=tuple(TESTS[:1])))
        assert verdict.reason == "timeout"
    assert counting.asked == 2


# ── problems that are made here ────────────────────────────────────────────────────────────────────────────────────────


def tiny(made):
    return made(
        tasks=generated.NAME, tool_format="fenced", feedback="brief", instructions=False, public_tests=2, turn_reward=0.1
    )


async def test_generated_problems_are_split_for_good(made):
    environment = tiny(made)
    held_out = environment.tasks("eval", 0)
    assert held_out.size is not None
    shown = {held_out[index].messages[0].content + str(held_out[index].answer) for index in range(held_out.size)}
    assert len(shown) == held_out.size
    train = environment.tasks("train", 3)
    seen = {train[index].messages[0].content + str(train[index].answer) for index in range(2000)}
    assert not seen & shown
    assert 500 < len(seen) <= 720 - held_out.size
    assert 110 < held_out.size < 180


async def test_whatever_is_said_of_generated_problems_is_in_the_vocabulary(made):
    environment = tiny(made)
    vocabulary = environment.vocabulary()
    source, words = environment.tasks("train", 0), set(vocabulary.words)

    async def one(task):
        episode = await play_by_hand(environment, task, environment.demonstrations(task, random.Random(task.id)))
        assert episode.done
        for message in episode.transcript:
            found = re.findall(vocabulary.pattern, message.content)
            assert "".join(found) == message.content
            assert set(found) <= words

    await asyncio.gather(*[one(source[index]) for index in range(16)])
    state = await environment.setup(source[0])
    assert said(await environment.step(state, Reply(text="x, x"))) == "error"
    assert said(await environment.step(state, Reply(text="def f(x): return  + x"))) in ("0 of 2 pass", "1 of 2 pass")


async def test_demonstrations_know_the_moves_and_give_up(made):
    environment = tiny(made)
    source = environment.tasks("train", 0)
    ends = []
    for index in range(1000):
        task = source[index]
        *guesses, _ = replies = environment.demonstrations(task, random.Random(index))
        assert len(set(replies)) == len(replies)
        ends.append(task.answer in (replies if len(replies) == environment.max_attempts else guesses))
    assert 0.33 < sum(ends) / len(ends) < 0.43, "the sum over k of 0.25 * 0.35 ** k is 0.379"


async def test_each_wrong_operator_fails_a_hidden_example(made):
    """Otherwise a guess could be right by the tests and not by the problem."""
    environment = tiny(made)
    for split in ("train", "eval"):
        source = environment.tasks(split, 1)
        for index in range(100):
            task = source[index]
            right = str(task.answer)
            constant = task.messages[0].content.partition(":")[0]
            for operator in generated.OPERATORS:
                guess = f"{generated.HEAD}x{operator}{constant}"
                names: dict = {}
                exec(guess, names)
                passed = [eval(str(case).removeprefix("assert "), names) for case in task.info["cases"]]
                assert all(passed) == (guess == right)


async def test_generated_problems_need_closed_words(made):
    with pytest.raises(EnvironmentSetupError, match="builtin:tiny knows few words"):
        made(tasks=generated.NAME).vocabulary()
