"""`polyturn train RECIPE.yaml [section.key=value ...] [--resume [PATH]] [--dry-run]`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.cli.recipe_args import add_recipe, read_recipe
from polyturn.cli.resume_args import add_resume, resume_given

if TYPE_CHECKING:
    from polyturn.config.schema import Recipe
    from polyturn.loop.check import Checked
    from polyturn.loop.resume import Load


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("train", help="train a policy", description="Train a policy by the recipe, on this machine.")
    add_recipe(parser)
    add_resume(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, write the resolved recipe, train nothing")
    parser.add_argument("--force", action="store_true", help="train even what does not fit by the plan")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, then train: in this process, or in as many as the recipe asks for."""
    from polyturn.cli.launch import dry_run, launch
    from polyturn.launch.roles import needs_processes
    from polyturn.loop.check import check

    resume = resume_given(args)
    recipe = read_recipe(args)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not args.dry_run:
        return _train_rank(recipe, resume)
    if needs_processes(recipe):
        if args.dry_run:
            return dry_run(recipe, force=args.force)
        return launch(recipe, force=args.force, resume=resume, load=args.load)
    checked = check(recipe)
    for line in arithmetic(checked, force=args.force):
        print(line)
    return write_dry_run(checked) if args.dry_run else _train(checked, resume, args.load)


def arithmetic(checked: Checked, *, force: bool = False) -> list[str]:
    """Sentences on what a step is, and on GPUs what the plan is. Raises ConfigError for what does not fit, unless forced."""
    from polyturn.config.arithmetic import sentences
    from polyturn.plan.before_training import plan_here

    planned = plan_here(checked.recipe, num_tasks=checked.train_tasks.size, force=force)
    return [*sentences(checked.recipe, checked.train_tasks.size), *planned]


def write_dry_run(checked: Checked) -> int:
    """Write the resolved recipe and say where. Raises ConfigError when the folder can't be written to."""
    from polyturn.config.resolve import write_resolved
    from polyturn.errors import ConfigError

    output_dir = Path(checked.recipe.run.output_dir)
    target = output_dir / f"{checked.recipe.run.name}.resolved.yaml"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_resolved(checked.resolved, target)
    except OSError as error:
        raise ConfigError(
            f"run.output_dir={output_dir}: can't be written to ({error.strerror}); give another folder"
        ) from error
    print(f"dry run: everything that can be checked before a model loads is right; resolved recipe: {target}")
    return 0


def _train_rank(recipe: Recipe, resume: str | None) -> int:
    """Be one of the ranks that torchrun, or another starter that sets its variables, has started."""
    from polyturn.errors import ConfigError
    from polyturn.loop.check import check
    from polyturn.loop.drive import serve_rank
    from polyturn.loop.place import unseen
    from polyturn.loop.started import as_rank

    if resume is not None:
        raise ConfigError(
            "--resume in ranks that another program has started (RANK and WORLD_SIZE are set): only rank 0 would know the "
            "run's folder; let Polyturn start them, with trainer.num_ranks"
        )
    rank, recipe = as_rank(recipe, os.environ)
    checked = check(recipe)
    if rank:
        return serve_rank(checked, unseen(Path(recipe.run.output_dir)))
    for line in arithmetic(checked, force=True):
        print(line)
    return _train(checked, None, "all")


def _train(checked: Checked, resume: str | None, load: Load) -> int:
    from polyturn.config.resolve import write_resolved
    from polyturn.loop.drive import say, train_here
    from polyturn.loop.place import alone
    from polyturn.loop.resume import open_run

    folder = open_run(checked.recipe, resume, load, say)
    write_resolved(checked.resolved, folder.recipe)
    print(f"run folder: {folder.root}", flush=True)
    with alone(folder.root) as place:
        return train_here(checked, folder, place)
