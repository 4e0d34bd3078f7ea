"""`polyturn launch local RECIPE.yaml [section.key=value ...] [--resume [PATH]] [--dry-run]`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.cli.recipe_args import add_recipe, read_recipe
from polyturn.cli.resume_args import add_resume, resume_given

if TYPE_CHECKING:
    from polyturn.config.schema import Recipe
    from polyturn.loop.resume import Load


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "launch", help="start every process of a run", description="Start every process of a run, watch them, end them."
    )
    places = parser.add_subparsers(dest="place", metavar="PLACE", required=True)
    local = places.add_parser("local", help="on this machine", description="Start every process of a run on this machine.")
    add_recipe(local)
    add_resume(local)
    local.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    local.add_argument("--force", action="store_true", help="start even what does not fit by the plan")
    local.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, then start everything."""
    resume = resume_given(args)
    recipe = read_recipe(args)
    if args.dry_run:
        return dry_run(recipe, force=args.force)
    return launch(recipe, force=args.force, resume=resume, load=args.load)


def launch(recipe: Recipe, *, force: bool = False, resume: str | None = None, load: Load = "all") -> int:
    """Start all processes of the recipe's run and return its exit code when none is left."""
    from polyturn.processes.keeper import keep

    code = keep()  # before anything that may start threads, as the check does
    return _supervise(recipe, force, resume, load) if code is None else code


def _supervise(recipe: Recipe, force: bool, resume: str | None, load: Load) -> int:
    """Check, make the run folder, start everything. Runs in the keeper's child."""
    from polyturn.cli.train import arithmetic
    from polyturn.config.resolve import write_resolved
    from polyturn.launch.gpus import place
    from polyturn.launch.local import patience_of, run_roles
    from polyturn.launch.roles import described, role_specs
    from polyturn.loop.check import check
    from polyturn.loop.resume import open_run
    from polyturn.metrics.logs import set_up_logging
    from polyturn.processes.gpus import visible_gpus

    set_up_logging(recipe.run.log_level)
    checked = check(recipe)
    gpus = visible_gpus()
    place(checked.recipe, gpus)  # refuses before there is a folder
    for line in arithmetic(checked, force=force):
        print(line)
    folder = open_run(checked.recipe, resume, load, partial(print, flush=True))
    folder.put_away()
    write_resolved(checked.resolved, folder.recipe)
    specs = role_specs(checked.recipe, gpus, folder.recipe)
    for spec in specs:
        print(described(spec))
    print(f"run folder: {folder.root}", flush=True)
    return run_roles(specs, folder, patience_of(checked.recipe))


def dry_run(recipe: Recipe, *, force: bool = False) -> int:
    """Check, say which processes there would be, write the resolved recipe."""
    from polyturn.cli.train import arithmetic, write_dry_run
    from polyturn.launch.roles import described, role_specs
    from polyturn.loop.check import check
    from polyturn.processes.gpus import visible_gpus

    checked = check(recipe)
    specs = role_specs(checked.recipe, visible_gpus(), Path("recipe.yaml"), elsewhere=True)
    for line in (*arithmetic(checked, force=force), *map(described, specs)):
        print(line)
    return write_dry_run(checked)
