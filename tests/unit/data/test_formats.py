"""Rows of the built-in formats in the words of the project, and what is said about the ones that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.data.fields import difficulty_rank
from polyturn.data.formats import BUILT_IN, BY_NAME, FORMATS, dominant, recognise, row_in
from polyturn.types import Message

PAIRS = [form for form in FORMATS if form.name != "messages"]


def names(fields, **options):
    return [form.name for form in recognise(fields, **options)]


def good(fields, fallback=None, **options):
    row, problems = row_in(fields, "a.jsonl:1", fallback, **options)
    assert problems == ()
    assert row is not None
    return row


def bad(fields, fallback=None, **options):
    row, problems = row_in(fields, "a.jsonl:1", fallback, **options)
    assert row is None
    return problems


@pytest.mark.parametrize("form", PAIRS, ids=lambda form: form.name)
def test_every_pair_is_recognised_and_read(form):
    row = good({form.prompt: "2 + 2?", form.answer: "4", "tests": ["assert True"], "id": 7})
    assert row.format == form.name
    assert row.messages == (Message(role="user", content="2 + 2?"),)
    assert (row.answer, row.tests, row.rest) == ("4", ("assert True",), {"id": 7})


def test_the_formats_of_the_issue_are_built_in():
    assert set(BUILT_IN) <= set(BY_NAME)
    assert BUILT_IN == (
        "instruction/response",
        "input/output",
        "problem/solution",
        "prompt/answer",
        "question/answer",
        "messages",
    )


def test_the_pair_that_says_more_wins():
    assert names({"instruction": "Add", "input": "2 3", "output": "5"}) == ["instruction/output"]
    assert names({"problem": "x", "solution": "steps", "answer": "4"}) == ["problem/answer"]
    assert good({"problem": "x", "solution": "steps", "answer": "4"}).rest == {"solution": "steps"}
    assert names({"prompt": "x", "solution": "y"}) == []
    assert names({"prompt": "x", "solution": "y", "test_cases": ["assert True"]}) == ["prompt/solution"]


def test_the_input_of_an_instruction_is_part_of_the_question():
    assert good({"instruction": "Add", "input": "2 3", "output": "5"}).messages[0].content == "Add\n\n2 3"
    assert good({"instruction": "Add 2 3", "input": "", "output": "5"}).messages[0].content == "Add 2 3"
    assert bad({"instruction": "Add", "input": 5, "output": "5"}) == ("'input' is a number; a string is needed",)


def test_fields_of_two_formats_are_not_guessed_at():
    (said,) = bad({"question": "x", "answer": "y", "instruction": "x", "response": "y"})
    assert said == "the fields fit instruction/response and question/answer; remove one pair, or give data.transform"


def test_a_question_with_tests_needs_no_answer():
    assert names({"prompt": "Write f", "tests": ["assert f()"]}) == ["prompt/answer"]
    row = good({"prompt": "Write f", "tests": ["assert f()"]})
    assert (row.answer, row.tests) == (None, ("assert f()",))
    assert names({"prompt": "Write f"}) == []
    assert good({"prompt": "Write f"}, need_answer=False).answer is None


def test_answers_are_aliases_and_the_first_one_is_the_answer():
    row = good({"question": "x", "answers": ["Cotswolds", "The Cotswolds", "Cotswolds"]})
    assert (row.format, row.answer, row.aliases) == ("question/answer", "Cotswolds", ("The Cotswolds",))
    row = good({"question": "x", "answer": "a", "aliases": ["b", "a"]})
    assert (row.answer, row.aliases) == ("a", ("b",))
    assert bad({"question": "x", "answers": ["a", 5]}) == ("answers[1] is a number; a string is needed",)


def test_every_optional_field():
    row = good(
        {
            "question": "x",
            "answer": "y",
            "system": "Be brief.",
            "difficulty": 3,
            "tags": "sums, time",
            "follow_up": "And?",
            "follow_up_response": "So.",
            "test_cases": ["assert 1", {"input": "1 2", "expected": "3"}],
        }
    )
    assert row.messages[0] == Message(role="system", content="Be brief.")
    assert (row.difficulty, row.tags, row.follow_up, row.follow_up_response) == (3.0, ("sums", "time"), "And?", "So.")
    assert (row.tests, row.test_cases) == (("assert 1",), ({"input": "1 2", "output": "3"},))
    assert row.rest == {}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("tags", 5, "'tags' is a number; a list of strings is needed"),
        ("tags", ["a", None], "tags[1] is null; a string is needed"),
        ("difficulty", True, "'difficulty' is true; a word or a number is needed"),
        ("difficulty", ["easy"], "'difficulty' is a list; a word or a number is needed"),
        ("tests", {"a": 1}, "'tests' is an object; a list of strings is needed"),
        ("tests", ["assert 1", " "], "tests[1] holds only white space"),
        ("test_cases", 5, "'test_cases' is a number; a list is needed"),
        ("test_cases", [5], "test_cases[0] is a number; a statement or an object with input and output is needed"),
        ("test_cases", [{"input": 1}], "test_cases[0].output is missing; a test case has input and output"),
        ("follow_up", 5, "'follow_up' is a number; a string is needed"),
        ("follow_up_response", "x", "'follow_up_response' is there and 'follow_up', which it answers, is not"),
        ("system", ["x"], "'system' is a list; a string is needed"),
    ],
)
def test_optional_fields_that_are_wrong(field, value, said):
    assert bad({"question": "x", "answer": "y", field: value}) == (said,)


@pytest.mark.parametrize("field", ["system", "tests", "test_cases", "difficulty", "tags", "aliases", "answers", "follow_up"])
@pytest.mark.parametrize("nothing", [None, ""])
def test_an_optional_field_without_a_value_is_not_there(field, nothing):
    row = good({"question": "x", "answer": "y", field: nothing})
    assert row == good({"question": "x", "answer": "y"})


def test_every_problem_of_a_row_is_named():
    assert bad({"question": 5, "answer": None, "tags": 1}) == (
        "'question' is a number; a string is needed",
        "'answer' is null; a string is needed",
        "'tags' is a number; a list of strings is needed",
    )


def test_a_near_miss_is_named():
    form = BY_NAME["instruction/response"]
    assert bad({"instruction": "x", "respones": "y"}, form) == (
        "the field 'response' is missing; the unknown field 'respones' may be meant",
    )
    assert bad({"instuction": "x", "response": "y"}, form) == (
        "the field 'instruction' is missing; the unknown field 'instuction' may be meant",
    )
    assert bad({"input": "x", "text": "y"}, form) == ("'instruction' and 'response' are missing; found 'input', 'text'",)
    (said,) = bad({"a": 1, "b": 2})
    assert said.startswith("no built-in format has these fields: 'a', 'b'; the formats are instruction/response, ")
    assert "found" not in bad({})[0]


def test_the_format_of_a_file_is_the_one_most_rows_are_in():
    rows = [{"question": "x", "answer": "y"}] * 2 + [{"instruction": "x", "response": "y"}]
    assert dominant(rows) is BY_NAME["question/answer"]
    assert dominant([{"instuction": "x", "respones": "y"}]) is BY_NAME["instruction/response"]
    assert dominant([{"zzz": 1}]) is None
    assert dominant([]) is None


# ── messages ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def said_by(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_the_last_assistant_message_is_the_reference():
    row = good({"messages": said_by(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))})
    assert [message.role for message in row.messages] == ["system", "user", "assistant", "user"]
    assert row.answer == "d"
    assert good({"messages": said_by(("user", "a"), ("assistant", "b")), "answer": "c"}).answer == "c"
    assert good({"messages": said_by(("user", "a")), "answer": "c"}).answer == "c"
    assert good({"messages": said_by(("user", "a")), "tests": ["assert 1"]}).answer is None
    assert good({"messages": said_by(("user", "a"))}, need_answer=False).messages[-1].role == "user"


def test_one_system_message():
    turns = {"messages": said_by(("system", "s"), ("user", "a"), ("assistant", "b"))}
    assert bad(turns | {"system": "t"}) == ("'system' and the system turn of 'messages' are both there; keep one",)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "'messages' is a string; a list of {role, content} is needed"),
        ([], "'messages' is empty"),
        (["hello"], "messages[0] is a string; an object with role and content is needed"),
        ([{"content": "x"}], "messages[0].role is missing"),
        ([{"role": None, "content": "x"}], "messages[0].role is null; one of system, user, assistant or tool is needed"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content is a list; a string is needed"),
        ([{"role": "user", "content": ""}], "messages[0].content is an empty string"),
        (said_by(("system", "x")), "there is no user turn; a user or system turn is needed first, then a user turn"),
        (said_by(("system", "s"), ("assistant", "x")), "the first turn is from the assistant; "),
        (said_by(("user", "a"), ("assistant", "b"), ("assistant", "c")), "'messages' ends with two assistant turns; "),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [{}]}],
            "messages[1].tool_calls is structured; write the call into content as the model says it",
        ),
    ],
)
def test_messages_that_are_wrong(messages, said):
    (found,) = bad({"messages": messages})
    assert found.startswith(said)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "input", "output"]), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    "instruction response input output problem solution prompt answer question messages tests test_cases difficulty tags "
    "aliases answers follow_up follow_up_response system other".split()
)


@given(st.dictionaries(FIELDS, JSON, max_size=6), st.booleans())
def test_any_row_is_a_row_or_says_why_not(fields, need_answer):
    row, problems = row_in(fields, "a.jsonl:1", BY_NAME["question/answer"], need_answer=need_answer)
    assert (row is None) == bool(problems)
    assert all(problem and "\n" not in problem for problem in problems)
    if row is not None:
        assert row.messages
        assert all(message.content.strip() for message in row.messages)
        assert all(isinstance(text, str) for text in (*row.tests, *row.tags, *row.aliases, row.answer or ""))
        assert row.answer is None or row.answer.strip()
        if need_answer:
            assert row.answer is not None or row.tests or row.test_cases


def test_difficulties_are_ordered():
    ranks = [difficulty_rank(word) for word in ("trivial", "Easy", "medium", " HARD ", "very_hard")]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 5
    assert [difficulty_rank(value) for value in ("Level 4", "lvl-2", "3.5", 7, 0.25)] == [4.0, 2.0, 3.5, 7.0, 0.25]
    assert [difficulty_rank(value) for value in ("purple", None, True, [1], "")] == [None] * 5
