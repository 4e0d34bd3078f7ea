"""Plays the gold replies and empty ones on every row of the real sets: what they score, and episodes a second.

python benchmarks/environments.py --data DIR --out benchmarks/results/environments.json

DIR is the folder with gsm8k, code, qa_trivia, qa_nq and qa_hotpot. Episodes are played 16 at a time, without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine

from polyturn.config.schema import SandboxSection
from polyturn.environments.base import Environment
from polyturn.environments.contract import play_by_hand
from polyturn.environments.registry import build_environment
from polyturn.loop.parts import opened, recipe_resources
from polyturn.loop.tasks import tasks_from_file
from polyturn.types import Task

AT_ONCE = 16
START_S = 600.0
GSM8K, CODE = "gsm8k/test.jsonl", "code"
QA = ("qa_trivia", "qa_nq", "qa_hotpot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the table. Without `files` the environment's own held-out tasks are played."""

    environment: str
    arguments: dict[str, Any]
    files: tuple[str, ...] = ()


def entries() -> list[Entry]:
    """All environments that have a scorer of their own."""
    found = [Entry(environment="lookup", arguments={"level": level}) for level in ("chain", "maze")]
    found += [Entry(environment="gsm8k", arguments={"tool": tool}, files=(GSM8K,)) for tool in ("none", "calculator")]
    for name in ("humaneval", "mbpp_sanitized"):
        for mode in ("single", "multi"):
            found.append(Entry(environment="python_code", arguments={"mode": mode}, files=(f"{CODE}/{name}.jsonl",)))
    found.append(Entry(environment="python_code", arguments={"tasks": "builtin:arithmetic"}))
    for folder in QA:
        arguments = {"corpus": f"{folder}/corpus.jsonl.gz"}
        found.append(
            Entry(environment="search_qa", arguments=arguments, files=(f"{folder}/train.jsonl", f"{folder}/test.jsonl"))
        )
    found.append(Entry(environment="search_qa", arguments={"corpus": "builtin:facts"}))
    found.append(Entry(environment="chat", arguments={"exact": True}, files=("qa_trivia/test.jsonl",)))
    found.append(Entry(environment="reasoning_gym:chain_sum", arguments={}))
    return found


async def scores(environment: Environment, tasks: Sequence[Task], replies: str) -> tuple[float, float]:
    """Mean score over full marks of gold or empty replies, and episodes a second."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(task: Task) -> float:
        async with slots:
            if replies == "gold":
                return (await play_by_hand(environment, task, environment.gold(task))).score
            return (await play_by_hand(environment, task, [""], repeat=True)).score

    start = time.perf_counter()
    found = await asyncio.gather(*map(one, tasks))
    seconds = time.perf_counter() - start
    return sum(found) / len(found) / environment.full_marks, len(found) / seconds


async def measure(entry: Entry, data: Path) -> dict[str, Any]:
    """One line of the table."""
    arguments = dict(entry.arguments)
    if "/" in arguments.get("corpus", ""):
        arguments["corpus"] = str(data / arguments["corpus"])
    resources = recipe_resources(SandboxSection())
    environment = build_environment(entry.environment, arguments, resources)
    async with opened(environment, resources, START_S):
        tasks: list[Task] = []
        for file in entry.files:
            source = tasks_from_file(str(data / file), environment)
            tasks += [source[index] for index in range(source.size)]
        if not entry.files:
            own = environment.tasks("eval", 0)
            assert own.size is not None, "held-out tasks have an end"
            tasks = [own[index] for index in range(own.size)]
        gold, rate = await scores(environment, tasks, "gold")
        empty, _ = await scores(environment, tasks, "empty")
    return {
        "environment": entry.environment,
        "arguments": entry.arguments,
        "rows": ", ".join(entry.files) or "its own held-out tasks",
        "num_rows": len(tasks),
        "gold": round(gold, 4),
        "empty": round(empty, 4),
        "episodes_per_s": round(rate, 1),
    }


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="ids of environments; all when left out")
    args = parser.parse_args()
    lines = []
    for entry in entries():
        if args.only and entry.environment not in args.only:
            continue
        lines.append(asyncio.run(measure(entry, args.data)))
        print(json.dumps(lines[-1]), flush=True)
    report = {"benchmark": "environments", **describe_machine(), "at_once": AT_ONCE, "lines": lines}
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
