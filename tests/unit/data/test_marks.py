"""Files whose answers end with `#### NUMBER`."""

from __future__ import annotations

import pytest

from polyturn.data.marks import final_answer, mark_problems, reads_as_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234", True),
        ("$1,234.50", True),
        ("12 apples", True),
        ("\\boxed{42}", True),
        ("$42$", True),
        ("3/4", True),
        ("\\frac{3}{4}", True),
        ("50%", True),
        ("-7", True),
        ("−7", True),  # noqa: RUF001
        ("1e3", True),
        ("72.", True),
        (".5", True),
        ("twelve", False),
        ("5 or 6", False),
        ("", False),
    ],
)
def test_one_number_whatever_is_around_it(text, number):
    assert reads_as_number(text) == number


def test_the_last_mark_counts():
    assert final_answer("#### 5\nNo.\n#### 6") == "6"
    assert final_answer("72") is None


def test_a_file_that_hardly_uses_the_mark_is_left_alone():
    assert mark_problems(["a", "b", "#### 5", "c", "d"]) == []
    assert mark_problems(["#### 5"]) == []
    assert mark_problems([None, None]) == []


def test_a_file_whose_marked_answers_are_words():
    assert mark_problems(["#### red", "#### blue", "#### ", "green"]) == [
        (2, "error", "nothing follows '####' in the answer"),
        (3, "error", "the answer has no '#### ' line, which 3 of 4 rows have"),
    ]


def test_a_comma_that_can_be_read_in_two_ways():
    found = mark_problems(["#### 1", "#### 2", "#### 3,5", "#### 1,234", "#### 12,34,567"])
    assert [(index, severity) for index, severity, _ in found] == [(2, "warning")]
