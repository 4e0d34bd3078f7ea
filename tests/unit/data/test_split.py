"""A split follows from what each row asks and from nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.data.load import load
from polyturn.data.split import side, side_paths, split_rows
from polyturn.data.writers import write_rows
from polyturn.errors import DataError

QUESTIONS = [f"question number {n} about {n % 7}" for n in range(300)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def rows_of(questions, answer="x"):
    return [{"question": question, "answer": answer} for question in questions]


def split(folder, rows, val=0.2, seed=0):
    write_rows(folder / "a.jsonl", rows, force=True)
    return split_rows(load(str(folder / "a.jsonl")), val=val, seed=seed)


def test_both_sides_together_are_the_file_in_its_order(folder):
    rows = rows_of(QUESTIONS)
    sides = split(folder, rows)
    assert [row for row in rows if row in sides.train] == list(sides.train)
    assert [row for row in rows if row not in sides.train] == list(sides.val)
    assert 0.1 < len(sides.val) / len(rows) < 0.3


def test_appending_moves_nothing(folder):
    few = split(folder, rows_of(QUESTIONS[:100]))
    many = split(folder, rows_of(QUESTIONS))
    assert list(many.train)[: len(few.train)] == list(few.train)
    assert list(many.val)[: len(few.val)] == list(few.val)


def test_order_and_answers_do_not_matter(folder):
    sides = split(folder, rows_of(QUESTIONS))
    other = split(folder, rows_of(reversed(QUESTIONS), answer="another"))
    assert {row["question"] for row in other.val} == {row["question"] for row in sides.val}


def test_questions_that_are_the_same_stay_together(folder):
    doubled = [form for question in QUESTIONS for form in (question, f"  {question.upper()}?")]
    sides = split(folder, rows_of(doubled))
    val = {row["question"].strip(" ?").lower() for row in sides.val}
    assert val.isdisjoint(row["question"].strip(" ?").lower() for row in sides.train)


def test_every_format_is_split_by_its_question(folder):
    pairs = split(folder, rows_of(QUESTIONS))
    chats = [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": q},
                {"role": "assistant", "content": "x"},
            ]
        }
        for q in QUESTIONS
    ]
    asked = {row["messages"][1]["content"] for row in split(folder, chats).val}
    assert asked == {row["question"] for row in pairs.val}
    unknown = [{"start": question} for question in QUESTIONS]
    assert len(split(folder, unknown).val) > 0


@given(question=st.text(min_size=1), val=st.floats(0.01, 0.99), more=st.floats(0, 0.5), seed=st.integers(0, 99))
def test_a_larger_share_only_adds(question, val, more, seed):
    first = side(question, val=val, seed=seed)
    assert first in ("train", "val")
    if first == "val":
        assert side(question, val=min(1.0, val + more), seed=seed) == "val"


@given(st.floats(0.05, 0.95), st.integers(0, 50))
def test_the_share_is_near_to_what_was_asked_for(val, seed):
    found = sum(side(str(n), val=val, seed=seed) == "val" for n in range(400)) / 400
    assert abs(found - val) < 5 * (val * (1 - val) / 400) ** 0.5 + 0.01


def test_another_seed_cuts_another_way(folder):
    sides = [{row["question"] for row in split(folder, rows_of(QUESTIONS), seed=seed).val} for seed in range(3)]
    assert len({frozenset(names) for names in sides}) == 3


def test_nearly_equal_questions_across_the_cut_are_counted(folder):
    base = " ".join(f"word{n}" for n in range(40))
    rows = rows_of([f"{base} {ending}" for ending in ("a", "b", "c", "d", "e", "f", "g", "h")])
    assert split(folder, rows, val=0.5).near_pairs > 0


@pytest.mark.parametrize(
    ("val", "said"), [(0.0, "--val=0 is no share"), (1.0, "--val=1 is no share"), (-1, "no share"), (float("nan"), "no share")]
)
def test_what_is_no_share(folder, val, said):
    with pytest.raises(DataError, match=said):
        split(folder, rows_of(QUESTIONS), val=val)


def test_an_empty_side_is_refused_with_a_seed_that_works(folder):
    rows = rows_of(["a", "b", "c"])
    lopsided = next(seed for seed in range(99) if {side(name, val=0.1, seed=seed) for name in "abc"} == {"train"})
    with pytest.raises(DataError, match=r"none of 3 rows falls on the val side .*; --seed \d+ gives both sides rows") as caught:
        split(folder, rows, val=0.1, seed=lopsided)
    words = str(caught.value).split()
    assert split(folder, rows, val=0.1, seed=int(words[words.index("gives") - 1])).val


def test_bad_rows_are_mended_first(folder):
    (folder / "a.jsonl").write_text('{"question": "x", "answer": "y"}\nred\n')
    with pytest.raises(DataError) as caught:
        split_rows(load(str(folder / "a.jsonl")), val=0.5, seed=0)
    assert str(caught.value).splitlines()[0].startswith(f"{folder}/a.jsonl:2: ")
    assert str(caught.value).splitlines()[1] == "nothing was split; mend these lines first"


def test_where_the_sides_go():
    assert side_paths("d/rows.jsonl") == (Path("d/rows.train.jsonl"), Path("d/rows.val.jsonl"))
    assert side_paths("rows.csv.gz", "out") == (Path("out/rows.train.csv.gz"), Path("out/rows.val.csv.gz"))
    assert side_paths("rows") == (Path("rows.train.jsonl"), Path("rows.val.jsonl"))
    assert side_paths("v1.2.json") == (Path("v1.2.train.json"), Path("v1.2.val.json"))


def test_the_cut_is_the_same_on_every_machine():
    found = [side(f"question {n}", val=0.5, seed=1) for n in range(8)]
    assert found == ["train", "train", "val", "val", "train", "val", "train", "val"]
