"""Runs a recipe of builtin:tiny with several seeds, warm start included, and records held-out success before and after.

python benchmarks/quickstart_seeds.py --seeds 0 1 2 3 4 --out benchmarks/results/quickstart_seeds.json
python benchmarks/quickstart_seeds.py --recipe search-qa-tiny --seeds 0 1 2 --out benchmarks/results/search_qa_tiny_seeds.json
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

RECIPES = Path(__file__).parents[1] / "recipes"
KEYS = ("eval/success", "eval/success_low", "eval/success_high", "eval_greedy/success", "eval/turns_per_trajectory")
LIMIT_S = 1800


def run_seed(recipe: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Train `recipe` with `seed` in an empty cache and read the run's metrics."""
    environment = {**os.environ, "POLYTURN_CACHE": str(folder / "cache"), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [
        sys.executable,
        "-m",
        "polyturn",
        "train",
        str(RECIPES / recipe / "recipe.yaml"),
        f"run.seed={seed}",
        f"run.output_dir={folder}",
        *overrides,
    ]
    start = time.perf_counter()
    subprocess.run(command, check=True, env=environment, timeout=LIMIT_S)
    rows = [json.loads(line) for line in (folder / recipe / "metrics.jsonl").read_text().splitlines()]
    last = max(row["step"] for row in rows)

    def evaluation(step: int) -> dict[str, float]:
        return {key: row[key] for row in rows if row["step"] == step for key in KEYS if key in row}

    curve = {row["step"]: round(row["success"], 4) for row in rows if "success" in row}
    return {
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "before": evaluation(0),
        "after": evaluation(last),
        "train_success": curve,
    }


def main() -> None:
    """Run all seeds and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="quickstart", help="a folder of recipes/ whose run has the same name")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's")
    args = parser.parse_args()
    results = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run_seed(args.recipe, seed, Path(folder), args.overrides))
        print(json.dumps({key: results[-1][key] for key in ("seed", "seconds", "before", "after")}), flush=True)
    named = {"benchmark": "quickstart_seeds", "recipe": args.recipe, "overrides": args.overrides}
    report = {**named, **describe_machine(), "seeds": results}
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
