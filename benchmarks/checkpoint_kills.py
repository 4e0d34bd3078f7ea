"""Kills a training run with -9 at random moments, resumes it, and compares the end with a run that was not killed.

    python benchmarks/checkpoint_kills.py --kills 200 --folder DIR --out benchmarks/results/checkpoint_kills.json

Every step is saved to shared memory and every third to disk, so most kills come while something is being written. Asked of
every run: it goes on from a verified step each time, never meets a torn checkpoint, and ends with the same weights, losses and
trajectories, to the bit. With a folder the same command goes on where it was cut: runs that have ended count, a cut one is made
again.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from parts.environments import PATTERN, WORDS
from parts.kill_cases import Cases
from parts.models import save_model_folder
from polyturn.checkpoint.places import memory_root

KILLS_A_RUN = 20
PROGRESS = "progress.json"


@dataclass
class Progress:
    """What runs that have ended add up to, and what they have in common."""

    commit: str
    seed: int
    steps: int
    kills: int = 0
    runs: int = 0
    resumed: int = 0
    rejected: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, folder: Path, *, commit: str, seed: int, steps: int) -> Progress:
        """As it was left in `folder`; from the beginning for another commit, seed or length."""
        fresh = cls(commit, seed, steps)
        try:
            found = cls(**json.loads((folder / PROGRESS).read_text()))
        except FileNotFoundError:
            return fresh
        if (found.commit, found.seed, found.steps) == (commit, seed, steps):
            print(f"goes on after {found.kills} kills in {found.runs} runs", flush=True)
            return found
        shutil.rmtree(folder)
        folder.mkdir(parents=True)
        print(f"{folder} is of commit {found.commit}, seed {found.seed}, {found.steps} steps: starts anew", flush=True)
        return fresh

    def write(self, folder: Path, out: Path | None, machine: dict[str, Any]) -> None:
        """Leave it in `folder`, and as a result."""
        draft = folder / f"{PROGRESS}.draft"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(folder / PROGRESS)
        found = {
            "benchmark": "checkpoint_kills",
            **machine,
            "kills": self.kills,
            "runs": self.runs,
            "steps_a_run": self.steps,
            "resumed_from_a_checkpoint": self.resumed,
            "torn_checkpoints_met": self.rejected,
            "equal_to_the_bit": True,
            "seconds": round(self.seconds),
        }
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n")


def one_run(place: Cases, number: int, words: tuple[str, ...], kills: int, progress: Progress) -> None:
    """A run that is killed so many times at most; then it must be the whole one."""
    name, start = f"cut-{number}-run", time.monotonic()
    shutil.rmtree(place.of(name), ignore_errors=True)  # of a run that was cut with this program
    shutil.rmtree(memory_root(place.of(name) / "checkpoints"), ignore_errors=True)
    (place.folder / f"{name}.txt").unlink(missing_ok=True)
    progress.kills += place.kill_until_done(name, words, kills, random.Random(f"{progress.seed} {number}"))
    place.assert_same(name, "whole")
    progress.resumed += len(re.findall("goes on after step", place.said(name)))
    progress.rejected += len(re.findall(r"not taken: (?!it has no manifest)", place.said(name)))
    progress.runs += 1
    progress.seconds += time.monotonic() - start
    shutil.rmtree(place.of(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where runs and counts stay; a temporary one when left out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    words = (f"run.steps={args.steps}", "checkpoint.every.memory=1", "checkpoint.every.disk=3")
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="polyturn-kills-") as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        progress = Progress.of(folder, commit=machine["commit"], seed=args.seed, steps=args.steps)
        place = Cases(folder, save_model_folder(folder / "model", WORDS, PATTERN))
        if not (place.of("whole") / "export").exists():
            shutil.rmtree(place.of("whole"), ignore_errors=True)
            assert place.run("whole", *words) == 0, place.said("whole")
        while progress.kills < args.kills:
            one_run(place, progress.runs, words, min(KILLS_A_RUN, args.kills - progress.kills), progress)
            progress.write(folder, args.out, machine)
            print(
                f"{progress.kills} kills, {progress.resumed} resumes from a checkpoint, {progress.rejected} torn ones met",
                flush=True,
            )


if __name__ == "__main__":
    main()
