"""Kills a training run with -9 at random moments, resumes it, and compares the end with a run that was not killed.

python benchmarks/checkpoint_kills.py --kills 200 --out benchmarks/results/checkpoint_kills.json

Every step is saved to shared memory and every third to disk, so most kills come while something is being written. Asked of
every run: it goes on from a verified step each time, never meets a torn checkpoint, and ends with the same weights, losses and
trajectories, to the bit.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from parts.environments import PATTERN, WORDS
from parts.kill_cases import Cases
from parts.models import save_model_folder

KILLS_A_RUN = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    words = (f"run.steps={args.steps}", "checkpoint.every.memory=1", "checkpoint.every.disk=3")
    moments, kills, resumed, rejected, start = random.Random(args.seed), 0, 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="polyturn-kills-") as scratch:
        folder = Path(scratch)
        place = Cases(folder, save_model_folder(folder / "model", WORDS, PATTERN))
        assert place.run("whole", *words) == 0, place.said("whole")
        runs = 0
        while kills < args.kills:
            name = f"cut-{runs}-run"
            kills += place.kill_until_done(name, words, min(KILLS_A_RUN, args.kills - kills), moments)
            place.assert_same(name, "whole")
            resumed += len(re.findall("goes on after step", place.said(name)))
            rejected += len(re.findall(r"not taken: (?!it has no manifest)", place.said(name)))
            runs += 1
            print(f"{kills} kills, {resumed} resumes from a checkpoint, {rejected} torn ones met", flush=True)
    found = {
        "benchmark": "checkpoint_kills",
        **describe_machine(),
        "kills": kills,
        "runs": runs,
        "steps_a_run": args.steps,
        "resumed_from_a_checkpoint": resumed,
        "torn_checkpoints_met": rejected,
        "equal_to_the_bit": True,
        "seconds": round(time.monotonic() - start),
    }
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
