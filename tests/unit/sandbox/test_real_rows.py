"""The rows of code that never end, of the data folder, end as its manifest says."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from polyturn.sandbox.base import Limits, Program, Tests
from polyturn.sandbox.local import LocalSandbox

FILE = "tests_loop_forever.jsonl"
ENDINGS = {
    "pass": ("passed",),
    "fail": ("failed", "error"),
    "timeout": ("timeout",),
    "timeout or output limit": ("timeout", "output"),
}

pytestmark = pytest.mark.real


async def test_rows_that_never_end():
    folder = Path(os.environ["POLYTURN_DATA"]) / "dirty_inputs"
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    (entry,) = [found for found in manifest["files"] if found["file"] == FILE]
    rows = [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]
    sandbox = LocalSandbox(Limits(wall_s=2, cpu_s=60))
    await sandbox.start()
    try:
        verdicts = await asyncio.gather(
            *[sandbox.run_tests(Program(source=row["solution"]), Tests(cases=tuple(row["tests"]))) for row in rows]
        )
    finally:
        await sandbox.stop()
    assert len(rows) == len(entry["expected_run"]) == 9
    for expected in entry["expected_run"]:
        verdict = verdicts[expected["line"] - 1]
        assert verdict.reason in ENDINGS[expected["result"]], (expected, verdict)
