"""`polyturn replay RECIPE.yaml FILE.jsonl [--out DIR] [--model PATH]`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from polyturn.cli.out import new_path, refuse_unwritable
from polyturn.cli.recipe_args import add_recipe, read_recipe

if TYPE_CHECKING:
    from polyturn.loop.replay import Replayed

_FIRST = ("loss", "grad_norm", "mismatch", "mismatch_max", "policy_age")


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "replay",
        help="train one step on recorded trajectories",
        description="Train one step on trajectories that `rollout` or a run recorded, without an engine.",
    )
    add_recipe(parser, ("file", "FILE.jsonl", "trajectories, such as a run's trajectories/step_1.jsonl"))
    parser.add_argument("--out", metavar="DIR", help="folder for the trained model; must not exist yet")
    parser.add_argument("--model", metavar="PATH", help="folder or hub id; the recipe's model when left out")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, read, train, print every number in full."""
    import asyncio
    from pathlib import Path

    from polyturn.loop.check import check

    out = None if args.out is None else new_path(args.out, "folder")

    checked = check(read_recipe(args), model=args.model)
    if out is not None:
        refuse_unwritable(out, "folder")

    from polyturn.loop.build import quiet_libraries
    from polyturn.loop.replay import replay

    quiet_libraries()
    replayed = asyncio.run(replay(checked, Path(args.file), model=args.model, out=out, say=print))
    for line in _lines(replayed):
        print(line)
    if out is not None:
        print(f"exported model: {out}")
    return 0


def _lines(replayed: Replayed) -> list[str]:
    """What was left out, then a line a number, with all its digits."""
    report, metrics = replayed.report, replayed.metrics
    names = [*_FIRST, *sorted(set(metrics) - set(_FIRST))]
    return [
        f"{report.planned} trajectories in {replayed.num_groups} groups; left out: {len(report.faults)} faults, "
        f"{len(report.broken_samples)} broken samples, {report.small_groups} small groups, "
        f"{report.zero_advantage_groups} groups with all advantages 0, {report.masked_truncated} cut by a limit",
        *(f"{name}={metrics[name]!r}" for name in names if name in metrics),
    ]
