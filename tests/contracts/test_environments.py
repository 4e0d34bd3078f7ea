"""Every environment keeps its contract, and `check_contract` finds each way in which one doesn't."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from itertools import count
from pathlib import Path

import pytest

from parts import author_tools
from polyturn.data.formats import BY_NAME, row_in
from polyturn.data.new import starter_rows
from polyturn.environments import contract
from polyturn.environments.base import Environment, StepResult, TaskList
from polyturn.environments.builtin.chat import Chat
from polyturn.environments.builtin.gsm8k import Gsm8k
from polyturn.environments.builtin.lookup import Lookup
from polyturn.environments.builtin.python_code import PythonCode
from polyturn.environments.builtin.search_qa import SearchQa
from polyturn.environments.builtin.tools import Tools
from polyturn.environments.builtin.user_sim import UserSim
from polyturn.environments.code import generated
from polyturn.environments.contract import ContractReport, check_contract, play_by_hand, show
from polyturn.environments.registry import BUILTIN, environment_class
from polyturn.environments.starter import Starter
from polyturn.errors import EnvironmentSetupError
from polyturn.loop.tasks import tasks_from_file
from polyturn.sandbox.local import LocalSandbox
from polyturn.types import Message, Task
from semantics.scenes import FOREVER

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_50.jsonl"
RULES = [
    "the same index gives the same task",
    "held-out tasks do not depend on the seed",
    "task ids are unique",
    "the gold replies score full marks",
    "empty replies do not score full marks",
    "a demonstration plays to its end",
]


class Twice(Environment):
    """Say the word twice, in two turns. The smallest environment with turns."""

    name = "twice"
    num_tasks = 5

    def tasks(self, split, seed):
        start = 0 if split == "eval" else 100 * (seed + 1)
        return TaskList([self.task(f"{split}/{start + index}", "abcde"[index]) for index in range(self.num_tasks)])

    def task(self, task_id, word):
        return Task(id=task_id, environment=self.name, messages=(Message(role="user", content=word),), answer=word)

    async def setup(self, task):
        return {"word": task.answer, "said": []}

    async def step(self, state, reply):
        state["said"].append(reply.text)
        right = reply.text == state["word"]
        return StepResult(messages=(Message(role="tool", content="again"),), reward=0.5 * right, done=len(state["said"]) == 2)

    async def rewards(self, state):
        return {"said": float(state["said"] == [state["word"]] * 2)}

    def gold(self, task):
        return [task.answer, task.answer]


class Endless(Twice):
    """Tasks without end, in both splits."""

    def tasks(self, split, seed):
        environment = self

        class Source:
            size = None

            def __getitem__(self, index):
                return environment.task(f"{split}/{seed if split == 'train' else ''}/{index}", "abcde"[index % 5])

        return Source()


class Blocking(Twice):
    """Methods that are no coroutines."""

    def setup(self, task):
        return {"word": task.answer, "said": []}

    def step(self, state, reply):
        state["said"].append(reply.text)
        return StepResult(done=len(state["said"]) == 2)

    def rewards(self, state):
        return {"said": float(state["said"] == [state["word"]] * 2)}


def lookups():
    for level, most in (("chain", 12), ("maze", 4)):
        for hops in (1, 3, most):
            for share in (0.0, 0.5, 1.0) if level == "chain" else (0.1,):
                yield Lookup(level=level, max_hops=hops, dead_end_share=share)


def chat():
    """`chat` over the rows that `polyturn data new` writes, as tasks of its own."""
    environment = Chat(exact=True)
    form = BY_NAME["question/answer"]

    def tasks(split, seed):
        rows = [row_in(fields, f"{split}:{line}", form)[0] for line, fields in enumerate(starter_rows(form), 1)]
        return TaskList([environment.task_from_example(row) for row in rows])

    environment.tasks = tasks
    return environment


def with_rows(environment, *rows):
    """An environment over a few rows, as tasks of its own."""

    def tasks(split, seed):
        made = [row_in(fields, f"{split}:{line}", None, need_answer=False)[0] for line, fields in enumerate(rows, 1)]
        return TaskList([environment.task_from_example(row) for row in made])

    environment.tasks = tasks
    return environment


CALL = {"name": "add", "arguments": {"a": 2, "b": 3}}
SUMS = ({"question": "2 + 3?", "answer": "5", "calls": [CALL]}, {"question": "4 + 4?", "answer": "8", "aliases": ["eight"]})


def tools():
    """`tools` with functions, a state, a class; each kind of outcome."""
    yield with_rows(Tools(tools=[author_tools.add, author_tools.price], exact=True), *SUMS)
    yield with_rows(Tools(tools=[author_tools.add], exact=True, answer_tag="answer", announce="template"), *SUMS)
    put = [{"name": "put", "arguments": {"item": "lamp"}}]
    row = {"question": "A lamp, please", "answer": "lamp", "calls": put}
    yield with_rows(Tools(tools=author_tools.Shop), row)
    yield with_rows(Tools(tools=[author_tools.put], state=author_tools.make_basket, score=author_tools.full), row)


def dialogue():
    """`user_sim` with turns written in the row."""
    row = {"prompt": "Hello", "user_turns": ["K7", "Bye"], "replies": ["Your number, please?", "Anything else?", "Goodbye"]}
    return with_rows(UserSim(score=lambda transcript, task: float(transcript[-1].content == "Goodbye")), row)


def searches():
    for form in ("xml", "hermes", "llama3", "mistral"):
        yield SearchQa(corpus="builtin:facts", tool_format=form, turn_reward=0.1, format_reward=0.1)
    yield SearchQa(corpus="builtin:facts", top_k=1, instructions=False)
    yield SearchQa(corpus="builtin:facts", tool_format="hermes", announce="template", examples=2)


def python_code(**arguments):
    """`python_code` with a sandbox that starts and stops with it."""
    sandbox = LocalSandbox()
    environment = PythonCode(sandbox=sandbox, **arguments)
    environment.start, environment.stop = sandbox.start, sandbox.stop
    return environment


GOOD = [
    *lookups(),
    *searches(),
    Twice(),
    Endless(),
    Blocking(),
    chat(),
    *tools(),
    dialogue(),
    Starter(),
    python_code(tasks=generated.NAME, public_tests=2),
]


GOOD_FROM_ROWS = [
    Gsm8k(),
    Gsm8k(tool="calculator", turn_reward=0.1, format_reward=0.1, examples=2),
    Gsm8k(format_reward=0.5, accept_unmarked=True, examples=1, instructions=False),
]


@pytest.mark.parametrize("name", ["humaneval_4", "mbpp_12"])
@pytest.mark.parametrize("mode", ["single", "multi"])
async def test_python_code_over_rows_keeps_its_contract(name, mode):
    environment = python_code(mode=mode, wall_s=30.0)
    report = await check_contract(environment, rows=tasks_from_file(str(GSM8K.with_name(f"{name}.jsonl")), environment))
    assert report.failed == []
    assert report.passed == RULES[2:]


def test_every_builtin_environment_is_held_to_the_contract():
    held = {type(environment) for environment in (*GOOD, *GOOD_FROM_ROWS)}
    assert {environment_class(name) for name in BUILTIN} <= held


@pytest.mark.parametrize("environment", GOOD_FROM_ROWS, ids=lambda e: f"{e.tool}-{e.examples}")
async def test_environments_that_read_rows_keep_their_contract(environment):
    report = await check_contract(environment, rows=tasks_from_file(str(GSM8K), environment))
    assert report.failed == []
    assert report.passed == RULES[2:], "the other rules are about tasks that an environment makes itself"
    assert report.shown is not None
    assert len(report.shown.turn_rewards) == (1 if environment.tool == "none" else 2)


@pytest.mark.real
@pytest.mark.parametrize("form", ["xml", "hermes", "llama3", "mistral"])
@pytest.mark.parametrize("rows", ["qa_trivia_24", "qa_trivia_held_out_8", "qa_trivia_no_support_4"])
async def test_search_over_real_rows_keeps_its_contract(form, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYTURN_CACHE", str(tmp_path))
    corpus = GSM8K.with_name("qa_trivia_corpus.jsonl")
    environment = SearchQa(corpus=str(corpus), tool_format=form, turn_reward=0.1, examples=1)
    report = await check_contract(environment, rows=tasks_from_file(str(GSM8K.with_name(f"{rows}.jsonl")), environment))
    assert report.failed == []
    assert report.passed == RULES[2:]


async def test_rows_are_what_is_played_and_no_task_is_asked_for():
    rows = TaskList([Twice().task("row/1", "a"), Twice().task("row/2", "b"), Twice().task("row/2", "c")])
    report = await check_contract(
        made(tasks=fails(AssertionError("not asked for")), gold=lambda self, task: ["b", "b"]), rows=rows
    )
    assert report.failed == [
        "task ids are unique: two tasks share an id",
        "the gold replies score full marks: task row/1 scores 0 of 1",
    ]


@pytest.mark.parametrize("environment", GOOD, ids=lambda e: f"{e.name}-{type(e).__name__}")
@pytest.mark.parametrize("seed", [0, 1])
async def test_environments_keep_their_contract(environment, seed):
    report = await check_contract(environment, seed=seed)
    assert report.failed == []
    assert report.passed == RULES
    assert report.shown is not None
    assert report.shown.done


async def failures(environment: Environment) -> dict[str, str]:
    report: ContractReport = await check_contract(environment)
    assert len(report.passed) + len(report.failed) == len(RULES)
    return dict(line.split(": ", 1) for line in report.failed)


def made(**changes) -> Environment:
    """The environment above with other methods."""
    return type("Broken", (Twice,), changes)()


def fails(error):
    def method(self, *arguments):
        raise error

    return method


async def fails_later(self, *arguments):
    raise ConnectionError("the pool is gone")


# ── each rule, broken ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_gold_that_does_not_score():
    found = await failures(made(gold=lambda self, task: ["a", "a"]))
    assert found == {"the gold replies score full marks": "task train/101 scores 0 of 1"}


async def test_gold_that_does_not_end():
    found = await failures(made(gold=lambda self, task: [task.answer], demonstrations=lambda self, task, rng: ["x", "x"]))
    assert found == {"the gold replies score full marks": "task train/100 is not done after the last reply"}


@pytest.mark.parametrize("replies", [[], ["a"], ["x"]])
async def test_a_demonstration_that_does_not_end(replies):
    found = await failures(made(demonstrations=lambda self, task, rng: replies))
    assert found == {"a demonstration plays to its end": "task train/100 is not done after the last reply"}


async def test_saying_nothing_that_scores():
    async def rewards(self, state):
        return {"said": 1.0}

    found = await failures(made(rewards=rewards))
    assert found == {"empty replies do not score full marks": "task train/100 gives 1 for saying nothing"}


async def test_full_marks_that_no_one_reaches():
    found = await failures(made(full_marks=2.0))
    assert found == {"the gold replies score full marks": "task train/100 scores 1 of 2"}


async def test_tasks_that_do_not_repeat():
    numbers = count()

    def tasks(self, split, seed):
        answer = "abcde"[next(numbers) % 5] if split == "train" else "a"
        return TaskList([self.task(f"{split}/{index}", answer) for index in range(3)])

    found = await failures(made(tasks=tasks))
    assert found == {"the same index gives the same task": "training task 0 differs when asked for again"}


async def test_one_source_that_does_not_repeat():
    """Every source is new at the same state, but asking it twice gives two tasks."""

    def tasks(self, split, seed):
        environment, numbers = self, count()

        class Source:
            size = 3

            def __getitem__(self, index):
                number = next(numbers) if split == "train" else 0
                return environment.task(f"{split}/{index}", "abcdefghijklmnopqrst"[number])

        return Source()

    assert list(await failures(made(tasks=tasks))) == ["the same index gives the same task"]


@pytest.mark.parametrize("what", ["tasks", "number"])
async def test_a_held_out_split_that_depends_on_the_seed(what):
    def tasks(self, split, seed):
        size = 3 if what == "tasks" or split == "train" else 3 + seed
        shift = seed if what == "tasks" else 0
        return TaskList([self.task(f"{split}/{index}", "abcdefgh"[index + shift]) for index in range(size)])

    found = await failures(made(tasks=tasks))
    problem = "held-out task 0 changes with the seed" if what == "tasks" else "3 tasks with seed 0, 4 with seed 1"
    assert found == {"held-out tasks do not depend on the seed": problem}


async def test_ids_that_two_tasks_share():
    def tasks(self, split, seed):
        return TaskList([self.task(f"task/{index}", "a") for index in range(3)])

    assert await failures(made(tasks=tasks)) == {"task ids are unique": "two tasks share an id"}


async def test_no_training_tasks():
    with pytest.raises(EnvironmentSetupError, match="twice has no training tasks"):
        await check_contract(made(num_tasks=0))


async def test_no_held_out_tasks_are_no_broken_rule():
    def tasks(self, split, seed):
        return TaskList([self.task(f"{split}/{index}", "a") for index in range(3 if split == "train" else 0)])

    assert await failures(made(tasks=tasks)) == {}


# ── exceptions and answers that are none ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["setup", "step", "rewards", "close"])
async def test_an_exception_while_playing(method):
    found = await failures(made(**{method: fails_later}))
    problem = "task train/100 raised ConnectionError: the pool is gone"
    assert found == dict.fromkeys(RULES[3:], problem)


@pytest.mark.parametrize("error", [KeyError("answer"), SystemExit(2)], ids=["KeyError", "SystemExit"])
async def test_an_exception_in_the_replies(error):
    found = await failures(made(gold=fails(error), demonstrations=lambda self, task, rng: ["x", "x"]))
    assert list(found) == ["the gold replies score full marks"]
    assert found["the gold replies score full marks"].startswith(f"task train/100 raised {type(error).__name__}")


async def test_an_exception_in_a_task():
    class Source:
        size = 3

        def __getitem__(self, index):
            raise FileNotFoundError("data.json")

    def tasks(self, split, seed):
        return Source() if split == "train" else TaskList([])

    report = await check_contract(made(tasks=tasks))
    assert "FileNotFoundError: data.json" in "\n".join(report.failed)


@pytest.mark.parametrize("split", ["train", "eval"])
async def test_an_exception_in_tasks(split):
    def tasks(self, asked, seed):
        if asked == split:
            raise FileNotFoundError("data.json")
        return Twice.tasks(self, asked, seed)

    report = await check_contract(made(tasks=tasks))
    assert f"tasks({split!r}, 0)" in "\n".join(report.failed)
    assert "FileNotFoundError: data.json" in "\n".join(report.failed)


@pytest.mark.parametrize(
    ("method", "value", "said"),
    [
        ("step", None, "twice.step returned None"),
        ("step", StepResult(messages=("again",)), "twice.step returned"),
        ("step", StepResult(reward=float("nan"), done=True), "reward"),
        ("rewards", 1.0, "twice.rewards returned 1.0"),
        ("rewards", {"said": "1"}, "said"),
    ],
)
async def test_an_answer_that_would_be_a_fault_in_a_rollout(method, value, said):
    async def answer(self, *arguments):
        return value

    found = await failures(made(**{method: answer}))
    assert said in found["the gold replies score full marks"]


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_method_that_never_returns(blocking, monkeypatch):
    monkeypatch.setattr(contract, "DEADLINE_S", 0.05)
    release = threading.Event()

    calls = []

    def block(self, state):
        calls.append(1)
        release.wait(5)

    async def never(self, state):
        calls.append(1)
        await asyncio.sleep(FOREVER)

    try:
        found = await failures(made(rewards=block if blocking else never))
    finally:
        release.set()
    # Each kind of play meets it once, not once a task: a real deadline is a minute.
    problem = "task train/100 raised DeadlineError: waited 0.05 s for twice.rewards, which is its deadline, and it did not come"
    assert found == dict.fromkeys(RULES[3:], problem)
    assert calls == [1, 1, 1]


# ── an episode by hand ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_episode_by_hand():
    environment = Twice()
    task = environment.tasks("eval", 0)[1]
    episode = await play_by_hand(environment, task, ["b", "x", "never said"])
    assert [(message.role, message.content) for message in episode.transcript] == [
        ("user", "b"),
        ("assistant", "b"),
        ("tool", "again"),
        ("assistant", "x"),
        ("tool", "again"),
    ]
    assert episode.turn_rewards == (0.5, 0.0)
    assert episode.outcome == {"said": 0.0}
    assert episode.done
    assert show(episode).splitlines() == [
        "task eval/1 (answer: b)",
        "  user:      b",
        "  assistant: b    reward 0.5",
        "  tool:      again",
        "  assistant: x    reward 0",
        "  tool:      again",
        "  outcome:   said=0.0",
    ]


async def test_an_episode_by_hand_is_closed_however_it_ends():
    closed = []

    async def close(self, state):
        closed.append(state["word"])

    environment = made(close=close, step=fails_later)
    with pytest.raises(ConnectionError):
        await play_by_hand(environment, environment.tasks("eval", 0)[0], ["a"])
    assert closed == ["a"]


async def test_a_missing_component_counts_as_nothing():
    async def rewards(self, state):
        return {"said": 1.0, "style": None}

    environment = made(rewards=rewards)
    episode = await play_by_hand(environment, environment.tasks("eval", 0)[0], ["a", "a"])
    assert episode.score == 1.0
    assert dataclasses.asdict(episode)["outcome"] == {"said": 1.0, "style": None}
