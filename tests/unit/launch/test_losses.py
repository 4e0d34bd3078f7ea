"""Which of several losses is to blame, and what is printed."""

from __future__ import annotations

import pytest

from polyturn.launch.losses import Blame, Loss, ended, last_lines, report, root_cause


def silent(role, when):
    return Loss(role=role, words="hangs", blame=Blame.KILLED_OR_SILENT, when=when, hangs=True)


@pytest.mark.parametrize(
    ("losses", "guilty"),
    [
        ([ended("trainer-0", 3, 1.0), ended("engine-0", -9, 1.1)], "engine-0"),
        ([ended("trainer-0", 3, 1.0), silent("engine-1", 1.5)], "engine-1"),
        ([ended("trainer-0", 3, 1.0), ended("engine-0", 1, 1.2)], "engine-0"),
        ([ended("trainer-0", 4, 1.0), ended("engine-0", 3, 0.9)], "trainer-0"),
        ([ended("engine-1", -9, 2.0), ended("engine-0", -11, 1.0)], "engine-0"),
        ([ended("trainer-1", -15, 1.0, Blame.ENDED_BY_OTHERS), ended("trainer-0", 3, 1.0)], "trainer-0"),
    ],
)
def test_the_cause(losses, guilty):
    assert root_cause(losses).role == guilty
    assert root_cause(reversed(losses)).role == guilty


@pytest.mark.parametrize(("code", "exit_code"), [(0, 3), (1, 3), (2, 2), (3, 3), (4, 4), (5, 3), (143, 3), (-9, 3), (-64, 3)])
def test_the_runs_exit_code(code, exit_code):
    assert ended("engine-0", code, 0.0).exit_code == exit_code


def test_own_sentences_are_repeated_as_they_are_and_once(tmp_path):
    (tmp_path / "engine-0.log").write_text("a\npolyturn: error: one\nb\npolyturn: error: two\npolyturn: error: one\n")
    assert report(ended("engine-0", 2, 0.0), tmp_path) == [
        "polyturn: error: one",
        "polyturn: error: two",
        f"polyturn: engine-0 ended the run; its log: {tmp_path}/engine-0.log",
    ]


def test_whoever_said_nothing_is_spoken_for(tmp_path):
    (tmp_path / "engine-0.log").write_text("Traceback\n\n  x\x1b[31m\n")
    (tmp_path / "engine-1.log").write_text("")
    head = "polyturn: error: engine-{} ended with exit code 2; the run ends; its log: {}/engine-{}.log"
    assert report(ended("engine-0", 2, 0.0), tmp_path) == [head.format(0, tmp_path, 0), "  Traceback", "    x [31m"]
    assert report(ended("engine-1", 2, 0.0), tmp_path) == [head.format(1, tmp_path, 1), "  (it wrote nothing)"]
    assert report(ended("engine-7", -9, 0.0), tmp_path)[1:] == ["  (it wrote nothing)"]


def test_last_lines_of_any_file(tmp_path):
    path = tmp_path / "x.log"
    assert last_lines(path, 10) == []
    path.write_bytes(b"first\n" + b"\xff\xfe" * 100_000 + b"\n" + b"x" * 1000 + b"\nlast, without an end")
    *_, long, last = last_lines(path, 10)
    assert (long, last) == ("x" * 300 + "...", "last, without an end")
    assert all(len(line) <= 303 for line in last_lines(path, 10))
    path.write_text("\n".join(map(str, range(100))))
    assert last_lines(path, 3) == ["97", "98", "99"]
