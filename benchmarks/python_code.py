"""How long HumanEval and MBPP take through the environment `python_code`, references for replies, and programs run a second.

POLYTURN_DATA=../shared/data python benchmarks/python_code.py --out benchmarks/results/python_code.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from machine import describe_machine

from polyturn.environments.builtin.python_code import PythonCode
from polyturn.environments.contract import play_by_hand
from polyturn.loop.tasks import tasks_from_file
from polyturn.sandbox.base import Limits
from polyturn.sandbox.local import LocalSandbox

SETS = ("humaneval.jsonl", "mbpp_sanitized.jsonl")


async def play_all(sandbox: LocalSandbox, path: Path, mode: Any) -> dict[str, Any]:
    """Every row's reference, all at once; programs wait for their turn in the sandbox."""
    environment = PythonCode(sandbox=sandbox, mode=mode)
    source = tasks_from_file(str(path), environment)
    tasks = [source[index] for index in range(source.size)]
    began = time.perf_counter()
    episodes = await asyncio.gather(*[play_by_hand(environment, task, environment.gold(task)) for task in tasks])
    seconds = time.perf_counter() - began
    runs = len(episodes) * (2 if mode == "multi" else 1)
    return {
        "rows": len(episodes),
        "full_marks": sum(episode.score == 1 for episode in episodes),
        "seconds": round(seconds, 1),
        "verdicts_per_second": round(runs / seconds, 1),
    }


async def measure(folder: Path) -> dict[str, Any]:
    """Both sets in both modes."""
    sandbox = LocalSandbox(Limits(wall_s=120, cpu_s=60))
    await sandbox.start()
    try:
        return {
            f"{name.partition('.')[0]}/{mode}": await play_all(sandbox, folder / name, mode)
            for name in SETS
            for mode in ("single", "multi")
        }
    finally:
        await sandbox.stop()


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report = {"benchmark": "python_code", **describe_machine(), "load_before": round(os.getloadavg()[0], 1)}
    report |= asyncio.run(measure(Path(os.environ["POLYTURN_DATA"]) / "code"))
    print(json.dumps(report, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
