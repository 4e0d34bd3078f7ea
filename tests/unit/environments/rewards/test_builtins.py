"""The small built-in rewards, by numbers worked out by hand, and the values that none of them may leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.environments.rewards.code import CodeRuns, TestsPassed
from polyturn.environments.rewards.in_results import AnswerInResults
from polyturn.environments.rewards.length import LengthPenalty
from polyturn.environments.rewards.repetition import RepetitionPenalty
from polyturn.environments.rewards.soft_format import SoftFormat
from polyturn.environments.rewards.tool_calls import ValidCalls
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.programs import Verdict
from unit.environments.rewards.scenes import said, task

# ── form ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<think>a</think> <answer>b</answer>", {"think", "answer", "order", "only"}),
        ("\n<think>a</think>\n<answer>b</answer>\n", {"think", "answer", "order", "only"}),
        ("So: <think>a</think><answer>b</answer>", {"think", "answer", "order"}),
        ("<answer>b</answer><think>a</think>", {"think", "answer"}),
        ("<think>a</think><answer>b", {"think"}),
        ("<think>a</think><think>a</think><answer>b</answer>", {"answer"}),
        ("<think> </think><answer>b</answer>", {"answer"}),
        ("<think>a<answer>b</think></answer>", {"think", "answer"}),
        ("b", set()),
        ("", set()),
    ],
)
def test_soft_format_scores_in_parts(text, kept):
    parts = SoftFormat()(said(text), task())
    assert set(parts) == {"think", "answer", "order", "only"}
    assert {name for name, value in parts.items() if value} == kept
    assert sum(parts.values()) == pytest.approx(len(kept) / 4)


def test_soft_format_of_the_last_reply_or_of_every_one():
    good, bad = "<a>x</a>", "x"
    assert sum(SoftFormat(tags=("a",))(said(bad, good), task()).values()) == pytest.approx(1)
    assert sum(SoftFormat(tags=("a",), turns="every")(said(bad, good), task()).values()) == pytest.approx(0.5)
    assert sum(SoftFormat(tags=("a",), turns="every")(said(bad, good, scope="turn"), task()).values()) == pytest.approx(1)


@given(st.text(alphabet="<>/think answer\n", max_size=60))
def test_soft_format_stays_between_0_and_1(text):
    assert 0 <= sum(SoftFormat()(said(text), task()).values()) <= 1 + 1e-9


# ── length and repetition ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (4, 0), (5, -0.25), (6, -0.5), (8, -1), (80, -1)])
def test_length_penalty(tokens, penalty):
    assert LengthPenalty(free=4, limit=8)(said(" ".join(["w"] * tokens)), task()) == penalty


def test_length_of_all_replies_or_of_one_turn():
    reward = LengthPenalty(free=0, limit=10)
    assert reward(said("a b", "c d e"), task()) == -0.5
    assert reward(said("a b", "c d e", scope="turn"), task()) == pytest.approx(-0.3)
    assert LengthPenalty(free=0, limit=10, unit="characters")(said("abcde"), task()) == -0.5


def test_repetition_penalty():
    reward = RepetitionPenalty(words=2)
    assert reward(said("a b c d"), task()) == 0
    # runs: ab bc ca ab bc, of which the last two came before
    assert reward(said("a b c A, b c"), task()) == pytest.approx(-1 / 6), "a comma is a word of its own: ab bc ca a, ,b bc"
    assert reward(said("a b c a b c"), task()) == pytest.approx(-2 / 5)
    assert reward(said("a b", "a b"), task()) == pytest.approx(-1 / 2)
    assert reward(said("a b", "a b", scope="turn"), task()) == -1
    assert reward(said("a"), task()) == 0
    assert RepetitionPenalty(words=2, free=0.4)(said("a b c a b c"), task()) == 0
    assert RepetitionPenalty(words=2, free=0.2)(said("a b c a b c"), task()) == pytest.approx(-0.25)


@given(st.lists(st.text("ab ", max_size=20), max_size=4), st.sampled_from(["turn", "trajectory"]))
def test_penalties_stay_between_minus_1_and_0(texts, scope):
    for reward in (RepetitionPenalty(words=2), RepetitionPenalty(words=1, free=0.5), LengthPenalty(free=1, limit=4)):
        assert -1 <= reward(said(*texts, scope=scope), task()) <= 0


# ── tools ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_valid_calls():
    assert ValidCalls()(said("a", "b", counts={}), task()) == 1
    assert ValidCalls()(said("a", "b", counts={"malformed": 1.0}), task()) == 0
    assert ValidCalls(counts=("unknown_record",))(said("a", counts={"unknown_record": 2.0}), task()) == 0
    assert ValidCalls()(said(), task()) is None


def test_answer_in_results():
    reward = AnswerInResults()
    assert reward(said("look", "done", results=("Lima is the capital.",)), task()) == 1
    assert reward(said("look", "Lima", results=("Cusco is old.",)), task()) == 0
    assert reward(said("look", results=("It is the city of the Kings.",)), task("x", aliases=["City of Kings"])) == 1
    assert reward(said("look", results=("It is the city of old kings.",)), task("x", aliases=["City of Kings"])) == 0
    assert reward(said("look", results=("yes, of course",)), task("Yes")) is None
    assert reward(said(), task()) == 0


def test_only_the_first_turn_that_shows_the_answer_is_paid():
    reward = AnswerInResults()
    shown = ("nothing", "Lima", "Lima again")
    paid = [reward(said(*"abc"[:n], results=shown[:n], scope="turn"), task()) for n in (1, 2, 3)]
    assert paid == [0, 1, 0]


# ── code ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Runner:
    """Says of each test whether its text stands in the program; `boom` breaks the sandbox."""

    def __init__(self):
        self.ran = []

    async def run_tests(self, code, tests, entry_points=None):
        self.ran.append(code)
        if "boom" in code:
            raise RuntimeError("the sandbox broke")
        return Verdict(loaded="crash" not in code, passed=tuple(test in code for test in tests))


CODE = "Here:\n```python\na = 1\nb = 2\n```"


async def test_tests_passed():
    tests = task(tests=["a = 1", "b = 2", "c = 3", "d = 4"])
    assert await TestsPassed(runner=Runner())(said(CODE), tests) == 0.5
    assert await TestsPassed(runner=Runner(), power=2.0)(said(CODE), tests) == 0.25
    assert await TestsPassed(runner=Runner(), all_or_nothing=True)(said(CODE), tests) == 0
    whole = task(tests=["a = 1", "b = 2"])
    assert await TestsPassed(runner=Runner(), all_or_nothing=True)(said(CODE), whole) == 1
    assert await TestsPassed(runner=Runner(), power=0.5)(said(CODE), whole) == 1


@pytest.mark.parametrize("text", ["", "I can't.", "```python\n```", "```python\ndef f(:\n```"])
async def test_what_is_no_program_is_scored_without_being_run(text):
    runner = Runner()
    assert await TestsPassed(runner=runner)(said(text), task(tests=["a"])) == 0
    assert await CodeRuns(runner=runner)(said(text), task()) == 0
    assert runner.ran == []


async def test_code_runs():
    assert await CodeRuns(runner=Runner())(said(CODE), task()) == 1
    assert await CodeRuns(runner=Runner())(said("crash = 1"), task()) == 0


async def test_a_task_without_tests_and_a_sandbox_that_breaks_are_no_scores():
    with pytest.raises(DataError, match="task a:1 has no tests"):
        await TestsPassed(runner=Runner())(said(CODE), task())
    with pytest.raises(RuntimeError, match="the sandbox broke"):
        await TestsPassed(runner=Runner())(said("boom = 1"), task(tests=["a"]))


@pytest.mark.parametrize(
    ("make", "said_of_it"),
    [
        (lambda: SoftFormat(tags=()), "is no list of tag names"),
        (lambda: SoftFormat(tags=("a b",)), "is no list of tag names"),
        (lambda: SoftFormat(tags="think"), "is no list of tag names"),
        (lambda: SoftFormat(turns="first"), "neither last nor every"),
        (lambda: LengthPenalty(free=4, limit=4), "free must be 0 or more, and less than limit"),
        (lambda: LengthPenalty(free=-1, limit=4), "free must be 0 or more"),
        (lambda: LengthPenalty(free=1, limit=4, unit="words"), "neither tokens nor characters"),
        (lambda: RepetitionPenalty(words=0), "is no length of a run"),
        (lambda: RepetitionPenalty(free=1.0), "is no share"),
        (lambda: TestsPassed(runner=Runner(), power=0.0), "must be above 0"),
    ],
)
def test_arguments_that_make_no_sense(make, said_of_it):
    with pytest.raises(EnvironmentSetupError, match=said_of_it):
        make()
