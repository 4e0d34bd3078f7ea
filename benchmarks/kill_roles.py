"""Kills a role of a run with six processes at a random moment, again and again: how it ends, and what is left.

python benchmarks/kill_roles.py --kills 200 --out benchmarks/results/kill_roles.json

Each run is `polyturn train` with an engine server, two trainer ranks and two environment processes. Asked of every end: exit
code 3, a sentence that names who was killed, no process, port, shared memory or file outside the run folder. What the file
holds already is kept and counted: an hour of kills may be made in several sittings.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from parts.environments import PATTERN, WORDS
from parts.live_runs import ROLES, LiveRun
from parts.models import save_model_folder
from parts.runs import RECIPE

START_S = 12.0
"""A kill while the run starts comes within this of it: six processes take about as long here."""


def kill_once(folder: Path, recipe: Path, role: str, chance: random.Random) -> dict[str, Any]:
    """Start a run, kill `role` in it, and say how it ended."""
    run = LiveRun(folder, recipe, "run.steps=100000")
    moment = "training" if chance.random() < 0.6 else "start"
    problem: str | None = None
    seconds = None
    try:
        if moment == "training":
            run.trains()
            time.sleep(chance.random())
        else:
            run.pid(role)
            time.sleep(chance.random() * START_S)
        began = time.monotonic()
        run.kill(role)
        ended = run.end()
        seconds = round(time.monotonic() - began, 2)
        named = re.search(rf"polyturn: error: {role} was killed by signal 9", ended.err)
        if ended.code != 3 or named is None:
            problem = f"exit code {ended.code}: {ended.err[-300:]}"
    except AssertionError as error:
        problem = f"left behind or stuck: {error}"
    finally:
        run.close()
    commit = describe_machine()["commit"]
    return {"role": role, "moment": moment, "seconds_to_end": seconds, "problem": problem, "commit": commit}


def main() -> None:
    """Kill, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: list[dict[str, Any]] = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    with tempfile.TemporaryDirectory() as scratch:
        model = save_model_folder(Path(scratch) / "model", WORDS, PATTERN)
        recipe = Path(scratch) / "recipe.yaml"
        recipe.write_text(RECIPE % {"model": model})
        for number in range(len(found), options.kills):
            chance = random.Random(f"{options.seed}/{number}")
            found.append(kill_once(Path(scratch) / str(number), recipe, ROLES[number % len(ROLES)], chance))
            print(json.dumps(found[-1]), flush=True)
            write(options.out, found, options.seed)


def write(out: Path, found: list[dict[str, Any]], seed: int) -> None:
    """The record so far: whoever stops the benchmark keeps what was measured."""
    times = [one["seconds_to_end"] for one in found if one["seconds_to_end"] is not None]
    summary = {
        "kills": len(found),
        "ended_as_promised": sum(one["problem"] is None for one in found),
        "seconds_to_end_median": statistics.median(times) if times else None,
        "seconds_to_end_max": max(times, default=None),
        "by_role": {role: sum(one["role"] == role for one in found) for role in ROLES},
    }
    out.write_text(json.dumps({**describe_machine(), "seed": seed, "summary": summary, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
