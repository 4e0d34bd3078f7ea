"""`polyturn eval RECIPE.yaml --model PATH [--split test | --data FILE] [--episodes N] [--out FILE]`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from polyturn.cli.recipe_args import add_recipe, read_recipe

if TYPE_CHECKING:
    from polyturn.loop.evaluate import Evaluation


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("eval", help="measure a model on held-out tasks", description="Play held-out tasks with a model.")
    add_recipe(parser)
    parser.add_argument("--model", metavar="PATH", help="folder or hub id; the recipe's model when left out")
    parser.add_argument(
        "--split", choices=("test", "eval", "train"), help="all tasks of a split: test and eval are the held-out ones"
    )
    parser.add_argument("--data", metavar="FILE", help="all rows of another file in place of the recipe's")
    parser.add_argument("--episodes", metavar="N", type=int, help="tasks; without --split or --data the recipe's number")
    parser.add_argument("--samples", metavar="K", type=int, help="attempts per task, for pass@k")
    parser.add_argument("--out", metavar="FILE", help="record every trajectory there, a JSON object a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, load, play, print."""
    import asyncio
    import json
    from pathlib import Path

    from polyturn.errors import ConfigError
    from polyturn.loop.check import check

    for name in ("episodes", "samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}={value}; give 1 or more")
    checked = check(read_recipe(args), model=args.model)

    from polyturn.loop.build import quiet_libraries
    from polyturn.loop.commands import evaluate_model

    quiet_libraries()
    say = (lambda _: None) if args.json else print
    results = asyncio.run(
        evaluate_model(
            checked,
            model=args.model,
            episodes=args.episodes,
            samples=args.samples,
            say=say,
            split=args.split,
            data=args.data,
            out=None if args.out is None else Path(args.out),
        )
    )
    if args.json:
        print(json.dumps({mode: result.metrics("eval") for mode, result in results.items()}, indent=2))
    else:
        for result in results.values():
            print_evaluation(result)
    return 0


def print_evaluation(result: Evaluation) -> None:
    """A table of what was measured, a line a number."""
    rows = [
        ("success", str(result.success)),
        *((f"pass@{k}", str(estimate)) for k, estimate in result.pass_at.items() if k > 1),
        ("reward", str(result.reward)),
        *((f"reward/{name}", str(estimate)) for name, estimate in result.components.items()),
        ("turns", str(result.turns)),
        ("tokens", str(result.tokens)),
        *((f"ended by {reason}", f"{share:.3f}") for reason, share in result.end_reasons.items()),
        *((f"{name} per episode", f"{value:.3f}") for name, value in result.counts.items()),
        ("faults", str(result.faults)),
    ]
    print(f"{result.mode}: {result.episodes} tasks x {result.attempts}; mean [95 % interval]")
    for name, value in rows:
        print(f"  {name:<28} {value}")
