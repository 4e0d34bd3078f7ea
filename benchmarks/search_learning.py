"""The published workflow of search_qa: measure, warm-start on demonstrations, measure, train, measure; on one GPU.

python benchmarks/search_learning.py --data DIR --out RESULT.json --steps 60

DIR holds train.jsonl, test.jsonl, no_support.jsonl and corpus.jsonl.gz. The result is written after every stage. A further
run trains the same start with the outcome alone, spread evenly over the turns (`algorithm.advantage=grpo`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe_machine

RECIPE = Path(__file__).parents[1] / "recipes" / "search-qa" / "gpu.yaml"
OUTCOME_ONLY = ("algorithm.advantage=grpo", "environment.args.turn_reward=0")
KEYS = ("step", "reward", "success", "turns_per_trajectory", "mismatch", "time/rollout_s", "time/train_s")
STAGE_S = 3600


class Workflow:
    """Runs `polyturn` and keeps what came of it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        data = args.data.resolve()
        self.folder = folder
        self.out: Path = args.out
        self.began = time.monotonic()
        self.shared = [
            f"data.path={data / 'train.jsonl'}",
            f"data.eval_path={data / 'test.jsonl'}",
            f"environment.args.corpus={data / 'corpus.jsonl.gz'}",
            f"run.output_dir={folder}",
            *args.overrides,
        ]
        self.no_support = data / "no_support.jsonl"
        self.report: dict[str, Any] = {
            "benchmark": "search_learning",
            **describe_machine(),
            "overrides": args.overrides,
            "evaluations": {},
            "training": {},
            "seconds": {},
        }

    def polyturn(self, name: str, verb: str, *words: str) -> str:
        """Run one command; what it prints."""
        start = time.monotonic()
        command = [sys.executable, "-m", "polyturn", verb, str(RECIPE), *words, *self.shared]
        log = self.out.with_name(f"{name.replace(' ', '-')}.log")
        with log.open("w") as stream:
            ended = subprocess.run(command, stdout=stream, timeout=STAGE_S, env=dict(os.environ), check=False)
        if ended.returncode != 0:
            raise SystemExit(f"{name}: exit code {ended.returncode}, see {log}")
        self.report["seconds"][name] = round(time.monotonic() - start, 1)
        return log.read_text()

    def evaluate(self, name: str, model: str) -> None:
        """All test rows, and those whose answer no passage holds."""
        for split, words in {"test": ("--split", "test"), "no_support": ("--data", str(self.no_support))}.items():
            said = self.polyturn(f"eval {name} {split}", "eval", "--model", model, "--json", *words)
            found = json.loads(said[said.index("{") :])
            self.report["evaluations"].setdefault(name, {})[split] = next(iter(found.values()))
        self.save()

    def train(self, name: str, model: str, steps: int, *words: str) -> str:
        """Train, and keep the curve. Returns the folder of the trained model."""
        self.polyturn(f"train {name}", "train", f"model.path={model}", f"run.name={name}", f"run.steps={steps}", *words)
        rows = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        steps_taken = [row for row in rows if "reward" in row]
        self.report["training"][name] = [{key: row[key] for key in KEYS if key in row} for row in steps_taken]
        self.save()
        return str(self.folder / name / "export")

    def save(self) -> None:
        """Write what is known so far."""
        self.report["total_s"] = round(time.monotonic() - self.began, 1)
        self.out.write_text(json.dumps(self.report, indent=1) + "\n")


def main() -> None:
    """Run all stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-steps", type=int, default=40)
    parser.add_argument("--no-baseline", action="store_true", help="leave out the run with the outcome alone")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Workflow(args, Path(folder))
        work.evaluate("base", "builtin:smollm2")
        warm = str(Path(folder) / "warm")
        work.polyturn("warmstart", "warmstart", "--out", warm, "--steps", str(args.warm_steps), "--learning-rate", "5e-5")
        work.evaluate("warm", warm)
        work.evaluate("turn_rtg", work.train("turn_rtg", warm, args.steps))
        if not args.no_baseline:
            work.evaluate("outcome", work.train("outcome", warm, args.steps, *OUTCOME_ONLY))


if __name__ == "__main__":
    main()
