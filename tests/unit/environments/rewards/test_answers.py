"""Answers by TriviaQA's rules: what is the same, what counts, and what a reply gives."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.environments.rewards.answers import given_answer, gold_answers, holds_answer, normalised, same_answer
from polyturn.environments.rewards.exact_match import ExactMatch
from polyturn.environments.rewards.f1 import F1, word_f1
from polyturn.errors import DataError, EnvironmentSetupError
from unit.environments.rewards.scenes import said, task


@pytest.mark.parametrize(
    ("given", "gold", "same"),
    [
        ("The Cotswolds", "cotswolds", True),
        ("  Cotswold-Hills, England! ", "Cotswold Hills (England)", True),
        ("an apple a day", "Apple day", True),
        ("Theatre", "atre", False),
        ("New_York", "new york", True),
        ("Sgt. Pepper\u2019s", "sgt pepper s", True),
        ("18 May 2018", "May 18, 2018", False),
        ("café", "cafe\u0301", True),
        ("cafe", "café", False),
        ("The The", "the the", True),
        ("The The", "a", False),
        ("", "The", False),
        ("", "", False),
        ("?!", "?!", True),
        ("STRASSE", "Straße", True),
        ("آرژانتین", "آرژانتین", True),
    ],
)
def test_when_two_answers_are_the_same(given, gold, same):
    assert same_answer(given, gold) == same


@given(st.text(max_size=30))
def test_normalising_twice_changes_nothing(text):
    assert normalised(normalised(text)) == normalised(text)
    assert same_answer(text, text) == bool(text.strip())


def test_every_answer_that_counts():
    assert gold_answers(task("a", aliases=["b", "a"], answers=["c", 5])) == ("a", "b", "c")
    assert gold_answers(task(None, answers="no list")) == ()


def test_where_the_answer_stands():
    reply = said("look", "<answer>Cusco</answer> no: <answer> Lima </answer>")
    assert given_answer(reply, tag="answer") == "Lima"
    assert given_answer(said("Lima"), tag="answer") is None
    assert given_answer(said("It is **Lima**. Or **Cusco**."), pattern=r"\*\*(.+?)\*\*") == "Cusco"
    assert given_answer(said("x"), pattern=r"\*\*(.+?)\*\*") is None
    assert given_answer(said("<think>Cusco? No.</think> Lima")) == "Lima"
    assert given_answer(said("  ")) is None
    assert given_answer(said()) is None


def test_an_answer_in_a_text_stands_as_whole_words():
    assert holds_answer("They live in the Cotswold Hills (England).", "Cotswold Hills, England")
    assert not holds_answer("They live in Lisbon", "Lis")
    assert not holds_answer("the a an", "the")


def test_exact_match():
    assert ExactMatch()(said("the LIMA!"), task()) == 1.0
    assert ExactMatch()(said("Lima, I think"), task()) == 0.0
    assert ExactMatch()(said("Ciudad de los Reyes"), task(aliases=["Ciudad de los Reyes"])) == 1.0
    assert ExactMatch(tag="answer")(said("Lima"), task()) == 0.0
    assert ExactMatch(tag="answer")(said("<answer>Lima</answer>"), task()) == 1.0
    with pytest.raises(DataError, match="task a:1 has no answer, and the reward exact_match compares with it"):
        ExactMatch()(said("x"), task(None))


@pytest.mark.parametrize(
    ("arguments", "said_of_them"),
    [
        ({"pattern": "("}, "is no regular expression"),
        ({"pattern": "x"}, "has no group"),
        ({"pattern": "(x)", "tag": "a"}, "both say where the answer is"),
    ],
)
@pytest.mark.parametrize("kind", [ExactMatch, F1])
def test_arguments_that_say_nothing_useful(kind, arguments, said_of_them):
    with pytest.raises(EnvironmentSetupError, match=said_of_them):
        kind(**arguments)


def test_f1():
    assert word_f1("the Cotswold Hills", "Cotswolds Hills") == 0.5
    assert word_f1("a b b", "b b c") == pytest.approx(2 * 2 / (2 + 3))
    assert word_f1("The", "the") == 1.0
    assert F1()(said("Lima in Peru"), task("Lima", aliases=["Lima Peru", "x"])) == pytest.approx(2 * 2 / 5)
    assert F1(tag="answer")(said("Lima"), task()) == 0.0


@given(st.text("ab c", max_size=12), st.text("ab c", max_size=12))
def test_f1_is_a_share_and_knows_no_order(left, right):
    assert 0 <= word_f1(left, right) <= 1
    assert word_f1(left, right) == word_f1(right, left)
    if same_answer(left, right):
        assert word_f1(left, right) == 1


@pytest.mark.real
def test_every_alias_of_the_real_questions_is_right_in_another_dress():
    path = Path(os.environ["POLYTURN_DATA"]) / "qa_trivia" / "test.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        asked = task(None, row["question"], answers=row["answers"])
        for alias in filter(normalised, row["answers"]):
            assert ExactMatch()(said(f" The  {alias}! "), asked) == 1.0, alias
        wrong = f"neither {other['answers'][0]} nor anything else"
        assert ExactMatch()(said(wrong), asked) == 0.0
        assert F1()(said(row["answers"][-1]), asked) == 1.0
