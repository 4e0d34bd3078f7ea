"""How many programs a second the local sandbox runs, what each costs, and how long all HumanEval and MBPP references take.

POLYTURN_DATA=../shared/data python benchmarks/sandbox_rate.py --out benchmarks/results/sandbox_rate.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from machine import describe_machine

from polyturn.sandbox.base import Limits, Program, Tests
from polyturn.sandbox.local import LocalSandbox
from polyturn.sandbox.suites import humaneval, mbpp

PRINTS = Program(source="print(6 * 7)")
ADDS = (Program(source="def add(a, b):\n    return a + b"), Tests(cases=("assert add(2, 3) == 5", "assert add(0, 0) == 0")))
SETS = (("humaneval.jsonl", humaneval), ("mbpp_sanitized.jsonl", mbpp))


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of all that it collected."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


async def rate(sandbox: LocalSandbox, job: Callable[[], Awaitable[Any]], number: int, repeats: int) -> dict[str, Any]:
    """Programs a second with as many at once as the sandbox allows, the middle of `repeats`, and processor time of one."""
    assert sandbox.pid is not None, "started"
    rates, cpu = [], cpu_seconds(sandbox.pid)
    for _ in range(repeats):
        began = time.perf_counter()
        await asyncio.gather(*[job() for _ in range(number)])
        rates.append(number / (time.perf_counter() - began))
    each = (cpu_seconds(sandbox.pid) - cpu) / (number * repeats)
    return {
        "per_second": round(statistics.median(rates), 1),
        "per_second_all": [round(one, 1) for one in rates],
        "cpu_ms": round(1000 * each, 1),
    }


async def one_after_the_other(job: Callable[[], Awaitable[Any]], number: int) -> dict[str, float]:
    """Milliseconds from asking to having the result, with nothing else running."""
    times = []
    for _ in range(number):
        began = time.perf_counter()
        await job()
        times.append(1000 * (time.perf_counter() - began))
    times.sort()
    return {"median_ms": round(statistics.median(times), 1), "p95_ms": round(times[int(0.95 * len(times))], 1)}


async def references(sandbox: LocalSandbox, folder: Path) -> dict[str, Any]:
    """All references of both sets through their tests."""
    found = {}
    for name, read in SETS:
        rows = [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        began = time.perf_counter()
        verdicts = await asyncio.gather(*[sandbox.run_tests(*read(row)) for row in rows])
        seconds = time.perf_counter() - began
        passed = sum(verdict.all_passed for verdict in verdicts)
        found[name] = {
            "rows": len(rows),
            "passed": passed,
            "seconds": round(seconds, 2),
            "rows_per_second": round(len(rows) / seconds, 1),
        }
    return found


async def measure(isolation: str, number: int, repeats: int, folder: Path | None) -> dict[str, Any]:
    """Everything for one kind of isolation."""
    sandbox = LocalSandbox(Limits(wall_s=120, cpu_s=60), isolation=isolation)  # type: ignore[arg-type]
    began = time.perf_counter()
    await sandbox.start()
    start_s = time.perf_counter() - began
    try:
        result = {
            "start_s": round(start_s, 2),
            "lines": [str(line) for line in sandbox.isolation],
            "run": await rate(sandbox, lambda: sandbox.run(PRINTS), number, repeats),
            "run_alone": await one_after_the_other(lambda: sandbox.run(PRINTS), 50),
            "run_tests": await rate(sandbox, lambda: sandbox.run_tests(*ADDS), number, repeats),
            "run_tests_alone": await one_after_the_other(lambda: sandbox.run_tests(*ADDS), 50),
        }
        if folder is not None:
            result["references"] = await references(sandbox, folder)
        return result
    finally:
        await sandbox.stop()


def main() -> None:
    """Measure both kinds of isolation and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    data = os.environ.get("POLYTURN_DATA")
    folder = None if data is None else Path(data) / "code"
    report = {"benchmark": "sandbox_rate", **describe_machine(), "load_before": os.getloadavg()[0]}
    for isolation in ("namespaces", "filters"):
        report[isolation] = asyncio.run(
            measure(isolation, args.number, args.repeats, folder if isolation == "namespaces" else None)
        )
        print(json.dumps({isolation: report[isolation]}, indent=1), flush=True)
    report["load_after"] = os.getloadavg()[0]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
