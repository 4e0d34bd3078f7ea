"""The report on a file: what is an error, what a warning, and the numbers it counts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from polyturn.data import validate
from polyturn.data.cache import tokenise
from polyturn.data.report import MOST_OF_A_KIND, as_json, lines
from polyturn.data.validate import Wanted, check_file, check_references
from polyturn.errors import DataError
from polyturn.programs import OutputCase, Verdict
from polyturn.types import Message


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _check(*rows, **wanted):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return check_file("a.jsonl", None, Wanted(**wanted))

    return _check


def qa(question, answer="Some answer.", **more):
    return {"question": question, "answer": answer, **more}


def found(checked, kind):
    return [(f.line, f.severity, f.reason) for f in checked.report.findings if f.kind == kind]


def words(openings):
    """A tokenizer of words; it knows no `zzz`."""

    def encode(messages):
        text = " ".join(message.content for message in messages)
        if "zzz" in text:
            raise DataError("the word 'zzz' is not in the tokenizer's vocabulary")
        return list(range(len(text.split())))

    return tokenise(openings, encode)


def test_numbers_of_a_good_file(check):
    report = check(
        qa("What is the capital of Peru?", "Lima.", difficulty="easy", tags=["a", "b"]),
        qa("How many legs has a spider?", "Eight.", difficulty=3, tags=["b"], note=""),
        qa("Who wrote the novel Emma?", "Jane Austen."),
    ).report
    assert report.ok
    assert (report.num_rows, report.num_usable, report.findings) == (3, 3, [])
    assert report.formats == {"question/answer": 3}
    assert report.fields == {
        "question": (3, 0),
        "answer": (3, 0),
        "difficulty": (2, 0),
        "tags": (2, 0),
        "note": (1, 1),
    }
    assert report.difficulty == {"easy": 1, "3": 1, "none": 1}
    assert report.tags == {"b": 2, "a": 1}
    assert report.lengths is not None
    assert (report.lengths.unit, report.lengths.longest, report.lengths.longest_line) == ("characters", 28, 1)


def test_questions_asked_twice(check):
    asked = "What is the capital of Peru?"
    checked = check(qa(asked, "Lima."), qa(asked.upper(), "lima"), qa(f" {asked}", "Cusco."))
    assert found(checked, "duplicate") == [(2, "warning", "the same question as on line 1")]
    assert found(checked, "conflict") == [(3, "warning", "the same question as on line 1, with another answer")]
    assert checked.report.ok


def test_questions_asked_nearly_twice(check):
    base = "a b c d e f g h i j k l m n o p q r s t u v w x y z".split()
    checked = check(qa(" ".join(base)), qa(" ".join([*base, "again"])))
    assert found(checked, "near_duplicate") == [
        (2, "warning", "nearly the same question as on line 1 (96% of their runs of words)")
    ]


def test_questions_that_hardly_ask(check):
    assert found(check(qa("Why?"), qa("Why is that so?")), "short") == [
        (1, "warning", "the question has only 4 characters: 'Why?'")
    ]


def test_openings_against_the_context(check):
    checked = check(
        qa(" ".join("word" for _ in range(10))),
        qa(" ".join("other" for _ in range(9))),
        qa(" ".join("third" for _ in range(4))),
        qa("zzz and more words"),
        encode_all=words,
        context_tokens=10,
        turn_tokens=4,
    )
    room = "rollout.max_trajectory_tokens=10"
    assert found(checked, "length") == [
        (1, "error", f"the opening takes 10 tokens, which leaves no room for a reply in {room}"),
        (2, "warning", f"the opening takes 9 tokens, which leaves 1 of {room} for all replies"),
        (4, "error", "the word 'zzz' is not in the tokenizer's vocabulary"),
    ]
    assert checked.report.num_usable == 2
    assert checked.report.lengths is not None
    assert (checked.report.lengths.unit, checked.report.lengths.limit) == ("tokens", 10)


def test_a_curriculum_needs_difficulties_that_can_be_ordered(check):
    rows = [qa("What is the capital of Peru?", difficulty="purple"), qa("How many legs has a spider?", difficulty=2)]
    assert found(check(*rows), "difficulty")[0][:2] == (1, "warning")
    rows.append(qa("Who wrote the novel Emma?"))
    assert [item[:2] for item in found(check(*rows, need_difficulty=True), "difficulty")] == [(1, "error"), (3, "error")]
    assert found(check(qa("How many legs has a spider?"), need_difficulty=True), "difficulty") == [
        (0, "error", "no row has a 'difficulty', and data.curriculum=easy_first orders rows by it")
    ]


def test_rows_of_an_environment_with_fields_of_its_own(check):
    def make_task(fields, row, where):
        assert row is None
        if "start" not in fields:
            raise DataError(f"field 'start' is missing ({where})")
        return (Message(role="user", content=f"find {fields['start']} among all the records"),)

    checked = check({"start": "a"}, {"begin": "b"}, knows_row=lambda fields: True, make_task=make_task)
    assert found(checked, "task") == [(2, "error", "field 'start' is missing (a.jsonl:2)")]
    assert found(checked, "row") == []
    assert (checked.report.num_usable, [line for line, _ in checked.openings]) == (1, [1])


def test_rows_without_an_answer_where_none_is_needed(check):
    row = {"prompt": "Write a poem about the sea."}
    assert not check(row).report.ok
    assert check(row, need_answer=False).report.ok


class Runner:
    async def run_tests(self, code, tests, entry_points=None):
        right = "print(1)" in code if isinstance(tests[0], OutputCase) else "return 1" in code
        return Verdict(loaded=True, passed=(right,) * len(tests))


async def test_references_that_fail_are_errors(check):
    rows = [
        {"prompt": f"Write the function f, number {n}", "response": f"def f():\n    return {n}", "tests": ["assert f() == 1"]}
        for n in (1, 2)
    ]
    cases = [{"input": "1", "output": "1"}]
    rows += [{"prompt": f"Print what is read, {n}", "response": f"print({n})", "test_cases": cases} for n in (1, 2)]
    rows.append({"prompt": "Write g, which nobody solved", "tests": ["assert g()"]})
    rows.append({"prompt": "Add the two", "response": "print(1)", "test_cases": [{"input": [1, 2], "output": 3}]})
    checked = check(*rows, style=False)
    assert checked.report.ok
    await check_references(checked, Runner())
    assert [(f.line, f.kind) for f in checked.report.errors] == [(2, "tests"), (4, "tests"), (6, "tests")]
    assert checked.report.errors[2].reason.startswith("test_cases[0].input is a list; it must be the text")
    assert checked.report.num_usable == 3
    assert checked.report.notes == [
        "5 references were run against their own tests, 2 pass",
        "1 rows have tests and no reference to run",
    ]


def test_style_can_be_left_out_and_a_missing_ruff_is_said(check, monkeypatch):
    row = {"prompt": "Write the function f", "response": "import os\ndef f():\n    return 1", "tests": ["assert f()"]}
    assert len(found(check(row), "style")) == 1
    assert found(check(row, style=False), "style") == []
    monkeypatch.setattr(validate, "find_ruff", lambda: None)
    assert check(row).report.notes == ["ruff is not installed, so the style of code was not looked at"]


def test_the_report_as_text_and_as_json(check):
    report = check(*[qa(f"Why {n}?") for n in range(MOST_OF_A_KIND + 5)], {"question": "What is missing here?"}).report
    printed = list(lines(report))
    assert printed[0] == f"a.jsonl: JSONL, {MOST_OF_A_KIND + 6} rows"
    assert sum("warning: the question has only" in line for line in printed) == MOST_OF_A_KIND
    assert "a.jsonl: 5 more warnings of the kind short; --all shows them" in printed
    assert f"a.jsonl:{MOST_OF_A_KIND + 6}: the field 'answer' is missing" in printed
    assert printed[-1] == (
        f"not ok: 1 error, {MOST_OF_A_KIND + 5} warnings; {MOST_OF_A_KIND + 5} of {MOST_OF_A_KIND + 6} rows can be used"
    )
    assert sum("the question has only" in line for line in lines(report, every=True)) == MOST_OF_A_KIND + 5
    plain = json.loads(json.dumps(as_json(report)))
    assert plain["ok"] is False
    assert len(plain["findings"]) == MOST_OF_A_KIND + 6
    assert plain["fields"]["question"] == {"rows": MOST_OF_A_KIND + 6, "empty": 0}


def test_a_file_that_is_not_there(check):
    with pytest.raises(DataError, match="does not exist"):
        check_file("gone.jsonl")


def test_lengths_are_summed_up():
    found = validate._summary(np.array([1, 2, 3, 4, 90]), [10, 20, 30, 40, 50], "tokens", 100)
    assert (found.mean, found.median, found.longest, found.longest_line) == (20.0, 3.0, 90, 50)
