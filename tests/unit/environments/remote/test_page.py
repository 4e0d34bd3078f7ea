"""docs/environment_processes.md: its numbers are the measured ones, its limits those of the program."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from polyturn.environments.remote import EnvironmentServer, RemoteEnvironment, wire

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "environment_processes.md").read_text(encoding="utf-8")


def test_the_numbers_are_the_measured_ones():
    measured = json.loads((ROOT / "benchmarks" / "results" / "environment_processes.json").read_text())
    rows = re.findall(r"\| (?:the driver|1 process|2 processes) \| ([\d,]+) \| (?:([\d,]+) ms )?\|", PAGE)
    told = [(int(rate.replace(",", "")), int(late.replace(",", "")) if late else None) for rate, late in rows]
    late = [line["driver_late_ms_p95"] for line in measured["lines"]]
    assert told == [
        (round(line["episodes_per_s"]), None if ms is None else round(ms))
        for line, ms in zip(measured["lines"], late, strict=True)
    ]
    assert len(told) == 6
    low, high = re.search(r"load average (\d) to (\d)", PAGE).groups()
    assert int(low) - 0.5 <= measured["load_before"] <= measured["load_after"] <= int(high) + 0.5


def test_the_limits_are_those_of_the_program():
    assert f"at most {wire.MOST_BYTES >> 20} MiB, one process at most {wire.MOST_OPEN:,} open trajectories" in PAGE
    assert "each within 5 seconds" in PAGE
    assert inspect.signature(EnvironmentServer).parameters["close_deadline_s"].default == 5.0
    assert "says nothing for a minute" in PAGE
    assert inspect.signature(RemoteEnvironment).parameters["silence_s"].default == 60.0
