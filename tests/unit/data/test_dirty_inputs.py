"""Every file of `tests/data/dirty_inputs` gives what its manifest says: each error on its line, the rows that can be used.

The two YAML files are recipes; `tests/unit/config/test_load.py` has them. What each program does when it is run
(`expected_run`) is the sandbox's business; here its code is found.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyturn.cli.main import main
from polyturn.data.load import load_formatted
from polyturn.data.report import lines
from polyturn.data.validate import check_file
from polyturn.errors import DataError
from polyturn.programs import program_in

FOLDER = Path(__file__).parents[2] / "data" / "dirty_inputs"
MANIFEST = {entry["file"]: entry for entry in json.loads((FOLDER / "manifest.json").read_text())["files"]}
ROWS = {name: entry for name, entry in MANIFEST.items() if name.endswith(".jsonl")}
ACCEPTED = {"json_array_not_jsonl.jsonl": 3, "input_output_naming.jsonl": 3}
"""Files that the manifest lets a reader accept, and how many rows it must then find."""
REMARKS = {"duplicate", "near_duplicate", "conflict", "short", "style"}
"""Kinds of warnings that go beyond the manifest."""

MEANINGS = {
    "truncated_last_line.jsonl": {3: ["column 59", "cut off", "no newline at its end"]},
    "empty_file.jsonl": {0: ["empty", "0 bytes"]},
    "duplicated_keys.jsonl": {2: ["'instruction'", "twice"], 3: ["'response'", "twice"]},
    "missing_response.jsonl": {3: ["'response' is missing"], 5: ["'response' is missing", "'respones' may be meant"]},
    "null_fields.jsonl": {
        2: ["'response' is null"],
        3: ["'instruction' is null"],
        4: ["'response' is an empty string"],
        5: ["'instruction' holds only white space"],
        6: ["the line is null; an object is needed"],
    },
    "non_string_instruction.jsonl": {
        1: ["'instruction' is a number"],
        2: ["'instruction' is a list"],
        3: ["'instruction' is an object"],
        4: ["'instruction' is true"],
        5: ["'response' is a number"],
        7: ["the line is a list; an object is needed"],
    },
    "latin1_bytes.jsonl": {2: ["byte 0xE9 at byte 71 of the line", "Latin-1", "save it as UTF-8"]},
    "one_200kb_line.jsonl": {2: ["200,0", "characters", "leave the row out"]},
    "nested_messages.jsonl": {
        3: ["ends with a user turn: no assistant turn"],
        4: ["'messages' is empty"],
        5: ["the first turn is from the assistant; a user or system turn is needed first"],
        6: ["messages[1].role is 'bot'; one of system, user, assistant or tool is needed"],
        7: ["messages[1].content is missing"],
    },
    "code_fence_response.jsonl": {9: ["fence", "empty: no code to run"], 10: ["'response' holds no code"]},
    "trailing_comma.jsonl": {
        2: ["a comma before the closing brace", "column 53"],
        3: ["a comma after the object", "column 67"],
    },
    "unicode_emoji_rtl.jsonl": {8: ["'instruction' holds a lone surrogate (\\ud83d)", "UTF-8"]},
    "numeric_answers.jsonl": {
        15: ["'3,5' is ambiguous"],
        17: ["no '#### ' line"],
        18: ["'twelve' is not a number"],
        19: ["nothing follows '####'"],
        20: ["'answer' is a number; a string is needed"],
    },
}


def test_the_copy_is_whole():
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".jsonl", ".yaml")} == set(MANIFEST)
    assert len(MANIFEST) == 20
    assert len(ROWS) == 18


@pytest.mark.parametrize("name", sorted(ROWS))
def test_each_file_gives_what_its_manifest_says(name):
    entry, report = ROWS[name], check_file(str(FOLDER / name)).report
    if name in ACCEPTED:
        assert report.ok
        assert report.num_usable == report.num_rows == ACCEPTED[name]
        return
    assert report.ok == (entry["verdict"] == "valid")
    assert report.num_usable == entry["valid_rows"]
    expected = [(problem["line"], problem["severity"]) for problem in entry["problems"]]
    found = [(finding.line, finding.severity) for finding in report.findings if finding.kind not in REMARKS]
    assert found == expected
    meanings = MEANINGS.get(name, {})
    assert set(meanings) == {line for line, _ in expected}
    for finding in report.findings:
        if finding.kind not in REMARKS:
            for words in meanings[finding.line]:
                assert words in finding.reason


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_command_prints_every_problem_with_file_and_line(name, capsys):
    path = FOLDER / name
    code = main(["data", "check", str(path)])
    shown = capsys.readouterr()
    report = check_file(str(path)).report
    assert code == (0 if report.ok else 2)
    assert shown.err == ""
    printed = shown.out.splitlines()
    for finding in report.errors:
        assert f"{path}:{finding.line}: {finding.reason}" in printed or finding.line == 0
    assert printed[-1].startswith("ok: " if report.ok else "not ok: ")


@pytest.mark.parametrize("name", sorted(ROWS))
def test_training_refuses_what_the_check_refuses_and_takes_the_rest(name):
    report = check_file(str(FOLDER / name)).report
    row_errors = [finding for finding in report.errors if finding.kind == "row"]
    if row_errors:
        with pytest.raises(DataError) as caught:
            load_formatted(str(FOLDER / name))
        assert len(str(caught.value).splitlines()) == len(row_errors)
    else:
        assert len(load_formatted(str(FOLDER / name))) == report.num_rows


def test_formats_and_containers_are_named():
    assert "  format: input/output ('input' asks, 'output' answers)" in list(
        lines(check_file(str(FOLDER / "input_output_naming.jsonl")).report)
    )
    array = check_file(str(FOLDER / "json_array_not_jsonl.jsonl")).report
    assert array.container == "JSON array"
    assert array.notes == ["one JSON array, 3 rows found in it"]
    assert check_file(str(FOLDER / "blank_lines.jsonl")).report.blank_lines == 5


def test_no_value_keeps_a_mark_or_a_carriage_return():
    rows = load_formatted(str(FOLDER / "bom_crlf.jsonl"))
    texts = [text for row in rows for text in (row.messages[0].content, row.answer or "")]
    assert not any(mark in text for text in texts for mark in ("\r", "\ufeff"))
    assert [row.where.rpartition(":")[2] for row in rows] == ["1", "2", "3"]


def test_unicode_comes_through_unchanged():
    checked = check_file(str(FOLDER / "unicode_emoji_rtl.jsonl"))
    raw = (FOLDER / "unicode_emoji_rtl.jsonl").read_bytes().split(b"\n")
    for line, row in checked.rows:
        expected = json.loads(raw[line - 1])
        assert row.messages[0].content == expected["instruction"]
        assert row.answer == expected["response"]


def test_blank_lines_count():
    assert [line for line, _ in check_file(str(FOLDER / "blank_lines.jsonl")).rows] == [2, 4, 7]


def test_one_long_line_is_read_whole():
    checked = check_file(str(FOLDER / "one_200kb_line.jsonl"))
    assert len(checked.rows[1][1].messages[0].content) > 199_000
    assert "1 of 3 rows are too long for any usual context" in checked.report.notes


def test_code_is_found_in_whatever_dress():
    rows = [json.loads(line) for line in (FOLDER / "code_fence_response.jsonl").read_text().splitlines()]
    expected = {entry["line"]: entry["result"] for entry in MANIFEST["code_fence_response.jsonl"]["expected_run"]}
    for line, row in enumerate(rows, 1):
        program = program_in(row["response"])
        names: dict = {}
        if program.code:
            exec(program.code, names)  # these files were written for this project
        passed = "add" in names and names["add"](2, 3) == 5 and names["add"](-1, 1) == 0
        assert passed == expected[line].startswith("pass"), line
