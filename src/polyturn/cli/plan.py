"""`polyturn plan RECIPE.yaml [--instance TYPE | --gpu KIND --gpus N] [--tasks N] [--hardware FILE] [--json]`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from polyturn.cli.recipe_args import add_recipe, read_recipe

if TYPE_CHECKING:
    from polyturn.plan.hardware import Hardware, Machine


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "plan",
        help="whether a run fits on GPUs",
        description="What every GPU of a run must hold, whether it can, and the nearest that fits. Loads nothing.",
    )
    add_recipe(parser)
    parser.add_argument("--instance", metavar="TYPE", help="machine by name, such as p4d.24xlarge or ml.p4d.24xlarge")
    parser.add_argument("--gpu", metavar="KIND", help="kind of GPU, such as a100-40gb")
    parser.add_argument("--gpus", metavar="N", type=int, help="how many of --gpu there are; 1 when left out")
    parser.add_argument("--tasks", metavar="N", type=int, help="training tasks; a recipe by run.epochs needs it")
    parser.add_argument("--hardware", metavar="FILE", help="your own GPUs and machines; docs/planner.md has the form")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and print; 2 when it does not fit."""
    import json

    from polyturn.errors import ConfigError
    from polyturn.plan.hardware import load_hardware
    from polyturn.plan.models import model_facts
    from polyturn.plan.nearest_fit import nearest_fit, plan_on, smallest_gpu
    from polyturn.plan.report import Verdict, as_object, lines

    if args.tasks is not None and args.tasks < 1:
        raise ConfigError(f"--tasks={args.tasks}; give 1 or more")
    recipe = read_recipe(args)
    hardware = load_hardware(*([args.hardware] if args.hardware else []))
    machine = _machine(args, hardware)
    facts = model_facts(recipe.model.path)
    plan = plan_on(recipe, facts, machine, num_tasks=args.tasks)
    problems = plan.problems(machine) if machine is not None else ()
    verdict = Verdict(
        problems=problems,
        overrides=nearest_fit(recipe, facts, machine, num_tasks=args.tasks) if machine is not None and problems else None,
        smallest_gpu=smallest_gpu(recipe, facts, hardware, num_tasks=args.tasks),
    )
    if args.json:
        print(json.dumps(as_object(plan, machine, verdict, num_tasks=args.tasks), indent=2))
    else:
        print("\n".join(lines(plan, machine, verdict, num_tasks=args.tasks)))
    return 0 if verdict.fits else 2


def _machine(args: argparse.Namespace, hardware: Hardware) -> Machine | None:
    """What the options name; None when they name nothing. Raises ConfigError."""
    from polyturn.errors import ConfigError

    if args.instance is not None:
        if args.gpu is not None or args.gpus is not None:
            raise ConfigError(f"--instance={args.instance} has its own GPUs; leave --gpu and --gpus out, or --instance")
        return hardware.machine(args.instance)
    if args.gpu is None:
        if args.gpus is not None:
            raise ConfigError(f"--gpus={args.gpus} of which kind? name it with --gpu, such as --gpu a100-40gb")
        return None
    return hardware.gpus_alone(args.gpu, 1 if args.gpus is None else args.gpus)
