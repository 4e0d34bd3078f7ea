"""Rows from format to format, and the starter sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.data.convert import converted, fields_of, format_named
from polyturn.data.formats import BUILT_IN, BY_NAME, row_in
from polyturn.data.load import load_formatted
from polyturn.data.new import starter_rows
from polyturn.data.validate import check_file
from polyturn.data.writers import write_rows
from polyturn.errors import DataError
from polyturn.types import Message, Row

TEXT = st.text(min_size=1, max_size=10).filter(str.strip)
ROWS = st.builds(
    Row,
    where=st.just("a.jsonl:1"),
    format=st.just("question/answer"),
    messages=st.builds(
        lambda system, question: (
            *((Message(role="system", content=system),) if system else ()),
            Message(role="user", content=question),
        ),
        st.none() | TEXT,
        TEXT,
    ),
    answer=TEXT,
    aliases=st.just(()),
    tests=st.lists(TEXT, max_size=2).map(tuple),
    test_cases=st.lists(st.fixed_dictionaries({"input": TEXT, "output": TEXT}), max_size=2).map(tuple),
    difficulty=st.none() | TEXT | st.floats(0, 5),
    tags=st.lists(TEXT, max_size=2).map(tuple),
    follow_up=st.just("And?"),
    follow_up_response=st.none() | TEXT,
    rest=st.dictionaries(st.sampled_from(["id", "level"]), st.integers() | TEXT, max_size=2),
)


@given(row=ROWS, name=st.sampled_from(BUILT_IN))
def test_there_and_back(row, name):
    form = BY_NAME[name]
    again, problems = row_in(fields_of(row, form), row.where, form)
    assert problems == ()
    assert again == replace(row, format=name)


def test_a_conversation_fits_messages_only():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    fields = {"messages": [{"role": role, "content": content} for role, content in turns]}
    row, _ = row_in(fields, "a.jsonl:4", None)
    assert row is not None
    assert fields_of(row, BY_NAME["messages"]) == fields
    with pytest.raises(DataError) as caught:
        converted([row, replace(row, where="a.jsonl:9")], BY_NAME["question/answer"])
    assert str(caught.value).splitlines() == [
        f"a.jsonl:{line}: a conversation of several turns does not fit question/answer; only messages holds it"
        for line in (4, 9)
    ]


def test_a_field_in_the_way_is_not_overwritten():
    row, _ = row_in({"question": "a", "answer": "b", "prompt": "c"}, "a.jsonl:1", None)
    assert row is None, "two formats"
    row, _ = row_in({"question": "a", "answer": "b", "response": "c"}, "a.jsonl:1", None)
    assert row is not None
    with pytest.raises(DataError, match="the field 'response' is there already"):
        fields_of(row, BY_NAME["instruction/response"])


def test_names_of_formats():
    assert format_named("instruction_response") is BY_NAME["instruction/response"]
    assert format_named("question/answer") is BY_NAME["question/answer"]
    with pytest.raises(DataError, match="did you mean instruction/response"):
        format_named("instruction_respones")


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("container", ["a.jsonl", "a.json", "a.csv"])
def test_a_starter_set_is_valid_in_every_format_and_container(tmp_path, name, container):
    path = tmp_path / container
    write_rows(path, starter_rows(BY_NAME[name]))
    report = check_file(str(path)).report
    assert report.findings == []
    assert report.formats == {name: report.num_rows}
    rows = load_formatted(str(path))
    assert any(row.follow_up_response for row in rows)
    assert any(row.tests for row in rows)
    assert all(row.difficulty and row.tags for row in rows)
