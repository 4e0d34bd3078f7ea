"""What is asked of the computer algebra system, and that no question outlives its deadline."""

from __future__ import annotations

import os

import pytest

from polyturn.environments.rewards import symbolic
from polyturn.environments.rewards.numbers import same_number
from polyturn.environments.rewards.symbolic import Worker, same_expression

FAKE = """
import os, signal, sys, time
mode = os.environ["FAKE_MODE"]
if mode == "dies at start":
    sys.exit(1)
print("ready", flush=True)
for line in sys.stdin:
    if "slow" in line:
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
        time.sleep(600)
    if "deaf" in line:
        time.sleep(600)
    if "dies" in line:
        sys.exit(1)
    print("true" if "yes" in line else "false", flush=True)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes workers whose child is the script above."""
    (tmp_path / "fake_child.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_MODE", "")
    monkeypatch.setattr(symbolic, "_MARGIN_S", 0.2)
    made: list[Worker] = []

    def make(deadline_s: float = 0.2) -> Worker:
        made.append(Worker("fake_child", deadline_s=deadline_s))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def child(worker: Worker) -> int:
    assert worker._process is not None
    return worker._process.pid


def test_one_child_answers_many_questions(fake):
    worker = fake()
    assert worker.ask("yes", "1") is True
    first = child(worker)
    assert worker.ask("no", "1") is False
    assert child(worker) == first


@pytest.mark.parametrize("question", ["slow", "deaf", "dies"])
def test_a_question_that_kills_its_child_is_answered_none_and_the_next_one_answered(fake, question):
    worker = fake()
    assert worker.ask("yes", "1") is True
    gone = child(worker)
    assert worker.ask(question, "1") is None
    with pytest.raises(ProcessLookupError):
        os.kill(gone, 0)
    assert worker.ask("yes", "1") is True


def test_a_child_that_does_not_start_is_asked_no_more(fake, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_MODE", "dies at start")
    worker = fake()
    assert worker.ask("yes", "1") is None
    assert "answers are compared as plain numbers only" in caplog.text
    monkeypatch.setenv("FAKE_MODE", "")
    assert worker.ask("yes", "1") is None


@pytest.fixture
def asked(monkeypatch):
    """The questions that reach the child, which says yes to all of them."""
    questions: list[tuple[str, str]] = []

    class Yes:
        def ask(self, given: str, expected: str) -> bool:
            questions.append((given, expected))
            return True

    monkeypatch.setattr(symbolic, "_WORKER", Yes())
    monkeypatch.setattr(symbolic, "_installed", lambda: True)
    symbolic._ask.cache_clear()
    yield questions
    symbolic._ask.cache_clear()


@pytest.mark.parametrize(
    "text", ["\\sqrt{16}", "2^{10}", "sqrt(16)", "2\\pi", "\\frac{\\sqrt{4}}{2}", "$\\sqrt{2}$", "(1 + 2)^2"]
)
def test_expressions_are_asked_about(asked, text):
    assert same_expression(text, "4")
    assert asked == [(text, "4")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2 + 3",  # work left undone
        "2 * 3",
        "5 or \\sqrt{16}",
        "\\sqrt{16}, 5",
        "x = \\sqrt{16}",
        "5 \\pm 1",
        "\\{4, 5\\}",
        "\\sqrt{16} \\text{ apples}",
        "__import__('os')",
        "9^{9^{9^{9}}}",
        "9^9999",
        "9**9**9",
        "2^{x}",
        "\\sqrt{" * 30,
    ],
)
def test_everything_else_is_not(asked, text):
    assert not same_expression(text, "4")
    assert asked == []


def test_plain_numbers_never_get_that_far(asked):
    assert not same_number("3/4", "4")
    assert not same_number("4", "5")
    assert asked == []
    assert same_number("\\sqrt{16}", "4")
    assert asked == [("\\sqrt{16}", "4")]


def test_the_same_question_is_asked_once(asked):
    assert same_expression("\\sqrt{16}", "4")
    assert same_expression("\\sqrt{16}", "4")
    assert len(asked) == 1


def test_without_the_library_expressions_are_no_numbers(monkeypatch):
    monkeypatch.setattr(symbolic, "_installed", lambda: False)
    assert not same_number("\\sqrt{16}", "4")


@pytest.mark.real
def test_the_library_itself():
    assert same_number("\\sqrt{16}", "4")
    assert same_number("2^{10}", "1024")
    assert not same_number("\\sqrt{16}", "5")
    assert not same_number("\\sqrt{-", "5")
