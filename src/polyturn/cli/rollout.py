"""`polyturn rollout RECIPE.yaml --out FILE.jsonl [--tasks N] [--model PATH]`."""

from __future__ import annotations

import argparse
from typing import Any

from polyturn.cli.out import new_path, refuse_unwritable
from polyturn.cli.recipe_args import add_recipe, read_recipe


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "rollout",
        help="record trajectories without training",
        description="Play training tasks as the first training step would, and write the trajectories as JSON lines.",
    )
    add_recipe(parser)
    parser.add_argument("--out", metavar="FILE.jsonl", required=True, help="file for the trajectories; must not exist yet")
    parser.add_argument("--tasks", metavar="N", type=int, help="tasks to play; those of a step when left out")
    parser.add_argument("--model", metavar="PATH", help="folder or hub id; the recipe's model when left out")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, load, play, write, print."""
    import asyncio

    from polyturn.cli.evaluate import print_evaluation
    from polyturn.errors import ConfigError
    from polyturn.loop.check import check

    out = new_path(args.out, "file")
    if args.tasks is not None and args.tasks < 1:
        raise ConfigError(f"--tasks={args.tasks}; give 1 or more")

    checked = check(read_recipe(args), model=args.model)
    refuse_unwritable(out, "file")

    from polyturn.loop.build import quiet_libraries
    from polyturn.loop.commands import rollout_model

    quiet_libraries()
    result = asyncio.run(rollout_model(checked, model=args.model, num_tasks=args.tasks, out=out, say=print))
    print_evaluation(result)
    print(f"trajectories: {out}")
    return 0
