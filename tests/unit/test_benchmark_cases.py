"""How benchmarks run their cases: whatever happens to one, what it found stays, and the next one has its turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from parts.runs import ROOT

TELLS = """
import json, sys, time
def tell(**found):
    open(sys.argv[1] + '.new', 'w').write(json.dumps(found))
    import os; os.replace(sys.argv[1] + '.new', sys.argv[1])
"""
CODE = {
    "ends": "tell(first=1); tell(first=1, second=2)",
    "hangs": "tell(first=1); time.sleep(600)",
    "fails": "tell(first=1); raise ValueError('a card is missing')",
    "silent": "pass",
}


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the handler of whoever runs the tests stays
    import cases

    return cases


def run(cases, out: Path, names: list[str], **limits) -> dict:
    record = cases.Record(out, {"device": "a test"})
    cases.run_cases(
        names,
        lambda name, file: [sys.executable, "-c", TELLS + CODE[name], str(file)],
        record,
        **({"limit_s": 300.0, "case_limit_s": 60.0} | limits),
    )
    return json.loads(out.read_text())


def test_what_cases_tell_is_in_the_file(cases, tmp_path):
    found = run(cases, tmp_path / "out.json", ["ends", "silent"])
    assert found["device"] == "a test"
    assert {key: found["cases"]["ends"][key] for key in ("first", "second")} == {"first": 1, "second": 2}
    assert set(found["cases"]["silent"]) == {"whole_s"}
    assert {path.name for path in tmp_path.iterdir()} == {"out.json", "out-ends.log", "out-silent.log"}


def test_a_case_that_fails_leaves_what_it_found_and_its_last_words(cases, tmp_path):
    found = run(cases, tmp_path / "out.json", ["fails", "ends"])["cases"]
    assert (found["fails"]["first"], found["fails"]["failed"]) == (1, 1)
    assert found["fails"]["last_words"][-1] == "ValueError: a card is missing"
    assert found["ends"]["second"] == 2


def test_a_case_that_hangs_is_ended_and_the_next_one_runs(cases, tmp_path):
    found = run(cases, tmp_path / "out.json", ["hangs", "ends"], case_limit_s=5.0)["cases"]
    assert found["hangs"]["cut_off"] == "after 5 s"
    assert found["hangs"]["first"] == 1
    assert "second" in found["ends"] or "cut_off" in found["ends"]


def test_nothing_is_begun_without_time_and_earlier_cases_stay(cases, tmp_path):
    out = tmp_path / "out.json"
    run(cases, out, ["ends"])
    found = run(cases, out, ["silent"], limit_s=1.0)["cases"]
    assert found["ends"]["second"] == 2
    assert found["silent"]["not_run"] == "1 s were left of 1"
