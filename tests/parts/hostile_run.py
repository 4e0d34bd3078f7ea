"""Runs hostile programs in a local sandbox as whoever started this, and prints as JSON what held and what got through.

python hostile_run.py ISOLATION FOLDER PORT: needs no packages but Polyturn's light rooms.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from parts.hostile import PROGRAMS, SECRET
from parts.processes import gone
from polyturn.sandbox.base import MIB, Limits, Program, Tests
from polyturn.sandbox.local import LocalSandbox


async def main(isolation: str, folder: str, port: str) -> None:
    """Run them all, one after the other."""
    limits = {"memory_bytes": 128 * MIB, "num_processes": 12, "output_bytes": 1 << 16, "file_bytes": MIB, "num_files": 64}
    sandbox = LocalSandbox(isolation=isolation)
    await sandbox.start()
    bait = {"folder": folder, "port": port, "socket": f"{folder}/socket", "secret": SECRET}
    wrong = []
    for hostile in PROGRAMS:
        source = hostile.source.format(**bait) if hostile.attempts else hostile.source
        result = await sandbox.run(Program(source=source), Limits(wall_s=0.3 if hostile.loops else 60, open_files=40, **limits))
        reasons = hostile.filters if hostile.filters and isolation == "filters" else hostile.reasons
        if result.reason not in reasons or "ESCAPED" in result.stdout or SECRET in result.stdout + result.stderr:
            wrong.append([hostile.name, result.reason, (result.stdout + result.stderr)[-500:]])
        await gone(sandbox.pid)
    verdict = await sandbox.run_tests(Program(source="def add(a, b): return a + b"), Tests(cases=("assert add(2, 3) == 5",)))
    await sandbox.stop()
    lines = {line.name: [line.held, line.how] for line in sandbox.isolation}
    print(json.dumps({"uid": os.getuid(), "lines": lines, "wrong": wrong, "passed": verdict.passed}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
