"""Which credit learns `lookup` level maze best, at equal tokens: reward content and turn placement set apart.

Arms differ in two things. *Content*: the outcome alone, or turn rewards too. *Placement*: one advantage for the whole
trajectory, or one per turn. All arms of a seed start from the same warm-started model, see the same tasks in the same order
and stop at the same number of sampled tokens.

python benchmarks/credit_assignment.py --seeds 0 1 2 3 4 --out benchmarks/results/credit_assignment.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from polyturn.config.schema import Recipe
from polyturn.loop.build import quiet_libraries
from polyturn.loop.check import check
from polyturn.loop.evaluate import evaluate
from polyturn.loop.sync import Run, build_run, train_step
from polyturn.loop.tiny import ensure_tiny
from polyturn.metrics.run_folder import RunFolder
from polyturn.metrics.sinks import MetricsLog

TURN_REWARD = 0.1


@dataclass(frozen=True)
class Arm:
    """One line of the table."""

    name: str
    advantage: str
    content: str
    placement: str
    options: Mapping[str, Any]


ARMS = (
    Arm("grpo, outcome only", "grpo", "outcome", "trajectory", {}),
    Arm("grpo, summed turn rewards", "grpo", "outcome + turns", "trajectory", {}),
    Arm("rloo, outcome only", "rloo", "outcome", "trajectory", {}),
    Arm("rloo, summed turn rewards", "rloo", "outcome + turns", "trajectory", {}),
    Arm("mt_grpo", "mt_grpo", "outcome + turns", "two segments", {}),
    Arm("gigpo", "gigpo", "outcome + turns", "turn, by state", {}),
    Arm("turn_rtg, outcome only", "turn_rtg", "outcome", "turn", {}),
    Arm("turn_rtg", "turn_rtg", "outcome + turns", "turn", {}),
)


class Recorder:
    """A metrics sink that keeps everything."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Keep one step."""
        self.rows.append({"step": step, **values})

    def close(self) -> None:
        """Nothing to close."""


def recipe_for(arm: Arm, seed: int, folder: Path, threads: int) -> Recipe:
    """The quickstart's sizes on the maze; only credit and turn reward differ between arms."""
    turn_reward = TURN_REWARD if "turns" in arm.content else 0.0
    return Recipe.model_validate(
        {
            "run": {"name": "credit", "seed": seed, "steps": 10_000, "output_dir": str(folder)},
            "model": {"path": "builtin:tiny"},
            "environment": {
                "id": "lookup",
                "args": {"level": "maze", "max_hops": 4, "instructions": False, "turn_reward": turn_reward},
            },
            "rollout": {"max_turns": 8, "max_turn_tokens": 8, "max_trajectory_tokens": 256},
            "algorithm": {"advantage": arm.advantage, "advantage_options": dict(arm.options)},
            "trainer": {"learning_rate": 3e-4, "threads": threads, "device": "cpu"},
            "logging": {"trajectories_every": 0},
            "checkpoint": {"every": {"disk": None}},
        }
    )


async def run_arm(arm: Arm, seed: int, budget_tokens: int, every_tokens: int, folder: Path, threads: int) -> dict[str, Any]:
    """Train until `budget_tokens` were sampled; evaluate at the start, each `every_tokens`, and the end."""
    checked = check(recipe_for(arm, seed, folder, threads))
    recorder = Recorder()
    run = await build_run(checked, RunFolder.create(folder, "credit"), MetricsLog([recorder]), lambda _: None)
    start = time.perf_counter()
    await run.engine.start()
    try:
        await run.bridge.push(run.trainer.version)
        curve = [{"tokens": 0, **await held_out(run)}]
        tokens, step, due = 0, 0, every_tokens
        while tokens < budget_tokens:
            step += 1
            await train_step(run, step)
            row = recorder.rows[-1]
            tokens += round(row["completion_tokens_per_trajectory"] * 128)
            if tokens >= due or tokens >= budget_tokens:
                curve.append({"tokens": tokens, **await held_out(run)})
                due += every_tokens
    finally:
        await run.engine.stop()
    return {
        "arm": arm.name,
        "seed": seed,
        "steps": step,
        "tokens": tokens,
        "seconds": round(time.perf_counter() - start, 1),
        "curve": curve,
    }


async def held_out(run: Run) -> dict[str, float]:
    """Held-out success and turns, sampled."""
    recipe, checked = run.checked.recipe, run.checked
    tasks = [checked.environment.tasks("eval", 0)[index] for index in range(512)]
    result = await evaluate(
        recipe, checked.environment, run.policy.renderer, run.engine, tasks, mode="sampled", samples_per_task=1
    )
    return {"success": round(result.success.mean, 4), "turns": round(result.turns.mean, 3)}


def table(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean, spread and worst seed of each arm at the end, and the mean over the whole curve."""
    rows = []
    for arm in ARMS:
        own = [result for result in results if result["arm"] == arm.name]
        final = [result["curve"][-1]["success"] for result in own]
        area = [sum(point["success"] for point in result["curve"][1:]) / (len(result["curve"]) - 1) for result in own]
        mean = sum(final) / len(final)
        spread = (sum((value - mean) ** 2 for value in final) / max(1, len(final) - 1)) ** 0.5
        rows.append(
            {
                "arm": arm.name,
                "content": arm.content,
                "placement": arm.placement,
                "final_mean": round(mean, 4),
                "final_std": round(spread, 4),
                "final_worst": min(final),
                "curve_mean": round(sum(area) / len(area), 4),
                "seeds": len(own),
            }
        )
    return rows


def prepare(job: tuple[Arm, int, int]) -> None:
    """Make the warm-started model of one seed and turn reward, so that no two runs make it at the same time."""
    arm, seed, threads = job
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        recipe = check(recipe_for(arm, seed, Path(folder), threads)).recipe
        environment = check(recipe).environment
        asyncio.run(ensure_tiny(recipe, environment, lambda _: None))


def work(job: tuple[Arm, int, int, int, int]) -> dict[str, Any]:
    """One run, in a process of its own."""
    arm, seed, tokens, every, threads = job
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(run_arm(arm, seed, tokens, every, Path(folder), threads))
    print(json.dumps({key: result[key] for key in ("arm", "seed", "steps", "seconds", "curve")}), flush=True)
    return result


def main() -> None:
    """Run every arm with every seed and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tokens", type=int, default=200_000, help="sampled tokens of a run")
    parser.add_argument("--every", type=int, default=40_000, help="sampled tokens between evaluations")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        one_of_each = {arm.content: arm for arm in ARMS}.values()
        list(pool.map(prepare, [(arm, seed, args.threads) for seed in args.seeds for arm in one_of_each]))
        jobs = [(arm, seed, args.tokens, args.every, args.threads) for seed in args.seeds for arm in ARMS]
        results = list(pool.map(work, jobs))
    head = {"benchmark": "credit_assignment", "tokens": args.tokens, **describe_machine()}
    report = {**head, "table": table(results), "runs": results}
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
