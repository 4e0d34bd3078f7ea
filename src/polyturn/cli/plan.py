"""`polyturn plan RECIPE.yaml`, `polyturn plan --suggest MODEL`: whether a run fits, how long it takes, what it costs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from polyturn.cli.recipe_args import add_from, read_recipe

if TYPE_CHECKING:
    from polyturn.plan.hardware import Hardware, Machine


_QUICKLY_COUNTED = 32 << 20
"""Bytes of a data file."""


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "plan",
        help="whether a run fits on GPUs",
        description="What every GPU of a run must hold, whether it can, what it costs, what fits instead. Loads nothing.",
    )
    parser.add_argument("recipe", metavar="RECIPE.yaml", nargs="?", help="the recipe to plan")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="settings that replace the recipe's")
    parser.add_argument("--suggest", metavar="MODEL", help="in place of a recipe: the cheapest machines for this model")
    parser.add_argument("--context", metavar="TOKENS", type=int, help="of a trajectory, for --suggest; 4096 when left out")
    parser.add_argument("--group-size", metavar="N", type=int, help="siblings of a task, for --suggest; 8 when left out")
    parser.add_argument("--instance", metavar="TYPE", help="machine by name, such as p4d.24xlarge or ml.p4d.24xlarge")
    parser.add_argument("--gpu", metavar="KIND", help="kind of GPU, such as a100-40gb")
    parser.add_argument("--gpus", metavar="N", type=int, help="how many of --gpu there are; 1 when left out")
    parser.add_argument("--nodes", metavar="N", type=int, default=1, help="how many such machines there are; 1 when left out")
    parser.add_argument("--budget-per-hour", metavar="DOLLARS", type=float, help="most that an hour may cost")
    parser.add_argument("--prefer", choices=("speed", "memory", "quality"), help="move the recipe's numbers that way first")
    parser.add_argument(
        "--fill", metavar="SHARE", type=float, help="of their limits that trajectories reach; 0.5 when left out"
    )
    parser.add_argument("--tasks", metavar="N", type=int, help="training tasks, where data.path does not say")
    parser.add_argument("--hardware", metavar="FILE", help="your own GPUs and machines; docs/planner.md has the form")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_from(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and print; 2 when it does not fit."""
    from polyturn.plan.hardware import load_hardware

    _refuse_absurd(args)
    hardware = load_hardware(*([args.hardware] if args.hardware else []))
    if args.suggest is not None:
        return _suggest(args, hardware)
    return _plan(args, hardware)


def _plan(args: argparse.Namespace, hardware: Hardware) -> int:
    from polyturn.errors import ConfigError
    from polyturn.plan.models import model_facts
    from polyturn.plan.report import as_object, lines
    from polyturn.plan.study import study

    if args.recipe is None:
        raise ConfigError("polyturn plan: name a recipe, or a model with --suggest MODEL")
    if args.context is not None or args.group_size is not None:
        raise ConfigError(
            "--context and --group-size are for --suggest; set rollout.max_trajectory_tokens=N or rollout.group_size=N instead"
        )
    recipe = read_recipe(args)
    num_tasks = _num_tasks(args, recipe.data.path)
    machine = _machine(args, hardware)
    facts = model_facts(recipe.model.path)
    if machine is None and args.budget_per_hour is not None:
        return _within_budget(args, hardware, recipe, facts, num_tasks)
    if machine is None and args.prefer is not None:
        raise ConfigError(f"--prefer={args.prefer} on which machine? name it with --instance or --gpu")
    found = study(
        recipe, facts, hardware, machine, num_tasks=num_tasks, fill=args.fill, goal=args.prefer, budget=args.budget_per_hour
    )
    _print(args, as_object(found) if args.json else lines(found))
    return 0 if found.verdict.fits else 2


def _suggest(args: argparse.Namespace, hardware: Hardware) -> int:
    from polyturn.errors import ConfigError
    from polyturn.plan.models import model_facts
    from polyturn.plan.suggest import suggest, suggestion_recipe

    given = [name for name in ("instance", "gpu", "gpus", "prefer", "recipe") if getattr(args, name) is not None]
    if given:
        raise ConfigError(f"--suggest={args.suggest} looks at every machine; leave {given[0]} out")
    facts = model_facts(args.suggest)
    context = 4096 if args.context is None else args.context
    if facts.max_positions is not None and context > facts.max_positions:
        raise ConfigError(f"--context={context}: {facts.name} has {facts.max_positions:,} positions; give at most as many")
    group_size = 8 if args.group_size is None else args.group_size
    recipe = suggestion_recipe(args.suggest, context=context, group_size=group_size)
    found = suggest(recipe, facts, hardware, nodes=args.nodes, budget=args.budget_per_hour, fill=args.fill)
    return _print_suggestions(args, found, facts, recipe, f"no known machine is large enough for {facts.name}")


def _within_budget(args: argparse.Namespace, hardware: Hardware, recipe: Any, facts: Any, num_tasks: int | None) -> int:
    """Machines for at most that price, for the recipe's own numbers."""
    from polyturn.plan.suggest import suggest

    found = suggest(recipe, facts, hardware, nodes=args.nodes, budget=args.budget_per_hour, num_tasks=num_tasks, fill=args.fill)
    none = f"nothing known makes it fit for ${args.budget_per_hour:g} an hour; leave --budget-per-hour out to see what it needs"
    return _print_suggestions(args, found, facts, recipe, none)


def _print_suggestions(args: argparse.Namespace, found: Any, facts: Any, recipe: Any, none: str) -> int:
    from polyturn.plan.report import suggestion_objects
    from polyturn.plan.suggest import suggestion_lines

    _print(args, suggestion_objects(found) if args.json else suggestion_lines(found, facts, recipe, none=none))
    return 0 if found else 2


def _print(args: argparse.Namespace, found: Any) -> None:
    import json

    print(json.dumps(found, indent=2) if args.json else "\n".join(found))


def _refuse_absurd(args: argparse.Namespace) -> None:
    """Raise ConfigError for numbers that mean nothing."""
    import math

    from polyturn.errors import ConfigError
    from polyturn.plan.speed import FILL

    if args.tasks is not None and args.tasks < 1:
        raise ConfigError(f"--tasks={args.tasks}; give 1 or more")
    if args.budget_per_hour is not None and not (0 < args.budget_per_hour < math.inf):
        raise ConfigError(f"--budget-per-hour={args.budget_per_hour:g}; give dollars above 0")
    args.fill = FILL if args.fill is None else args.fill
    if not 0 < args.fill <= 1:
        raise ConfigError(
            f"--fill={args.fill:g}; give the share of their limits that trajectories reach, above 0 and at most 1"
        )
    if args.nodes != 1 and args.instance is None and args.gpu is None and args.suggest is None and args.budget_per_hour is None:
        raise ConfigError(f"--nodes={args.nodes} of which machine? name it with --instance or --gpu")


def _num_tasks(args: argparse.Namespace, path: str | None) -> int | None:
    """As given, else the rows of a file on this machine that is quickly counted. Raises DataError when it can't be read."""
    from pathlib import Path

    given: int | None = args.tasks
    if given is not None or path is None or path.startswith("hf:"):
        return given
    from polyturn.data.rows import open_rows

    rows = open_rows(path)
    return None if Path(path).stat().st_size > _QUICKLY_COUNTED else sum(record.row is not None for record in rows)


def _machine(args: argparse.Namespace, hardware: Hardware) -> Machine | None:
    """What the options name; None when they name nothing. Raises ConfigError."""
    from polyturn.errors import ConfigError

    if args.instance is not None:
        if args.gpu is not None or args.gpus is not None:
            raise ConfigError(f"--instance={args.instance} has its own GPUs; leave --gpu and --gpus out, or --instance")
        return hardware.machine(args.instance).times(args.nodes)
    if args.gpu is None:
        if args.gpus is not None:
            raise ConfigError(f"--gpus={args.gpus} of which kind? name it with --gpu, such as --gpu a100-40gb")
        return None
    return hardware.gpus_alone(args.gpu, 1 if args.gpus is None else args.gpus).times(args.nodes)
