"""`polyturn env list`, `polyturn env check ID [key=value ...] [--data FILE]` and `polyturn env new NAME [--out DIR]`."""

from __future__ import annotations

import argparse
from typing import Any


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("env", help="list and check environments", description="List environments, or check one.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="environments that recipes can name", description="List built-in environments.")
    listing.set_defaults(run=run_list)
    checking = actions.add_parser(
        "check",
        help="hold an environment to its contract",
        description="Play by hand: gold replies must score full marks, empty ones must not; an episode is printed.",
    )
    checking.add_argument("id", metavar="ID", help="a name of `polyturn env list`, or package.module:Class")
    checking.add_argument("arguments", metavar="key=value", nargs="*", help="arguments of the environment")
    checking.add_argument("--data", metavar="FILE", help="rows to play: a JSONL file, or hf:owner/name[:config][@split]")
    checking.add_argument("--seed", type=int, default=0, help="seed of the tasks (default 0)")
    checking.set_defaults(run=run_check)
    starting = actions.add_parser(
        "new",
        help="write an environment of your own to start from",
        description="Write NAME.py, an environment in one file, test_NAME.py and NAME.yaml, a recipe that trains it.",
    )
    starting.add_argument("name", metavar="NAME", help="the module's name, such as red_boxes")
    starting.add_argument("--out", metavar="DIR", default=".", help="folder to write to (default: this one)")
    starting.add_argument("--force", action="store_true", help="overwrite files of these names")
    starting.set_defaults(run=run_new)


def run_list(args: argparse.Namespace) -> int:
    """One line an environment, with its arguments."""
    import inspect

    from polyturn.environments.registry import ADAPTERS, environment_class, environment_names
    from polyturn.environments.resources import own_parameters

    for name in (*environment_names(), *(f"{prefix}:NAME" for prefix in ADAPTERS)):
        cls = environment_class(name)
        summary = (inspect.getdoc(cls) or "").partition("\n")[0]
        parameters = own_parameters(inspect.signature(cls))
        if ":" in name:
            del parameters["name"]  # it stands in the id
        defaults = " ".join(f"{key}={value.default}" for key, value in parameters.items())
        print(f"{name:<18} {summary}\n{'':<18} {defaults}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Exit 0 when every rule holds, 2 when one is broken."""
    import asyncio

    from polyturn.config.load import parse_assignments
    from polyturn.config.schema import SandboxSection
    from polyturn.environments.contract import ContractReport, check_contract, show
    from polyturn.environments.registry import build_environment
    from polyturn.loop.parts import recipe_resources
    from polyturn.loop.tasks import tasks_from_file

    resources = recipe_resources(SandboxSection())
    environment = build_environment(args.id, parse_assignments(args.arguments), resources)
    rows = None if args.data is None else tasks_from_file(args.data, environment)

    async def whole() -> ContractReport:
        await resources.start()
        try:
            return await check_contract(environment, seed=args.seed, rows=rows)
        finally:
            await resources.stop()

    report = asyncio.run(whole())
    if report.shown is not None:
        print(show(report.shown))
    for line in report.passed:
        print(f"ok      {line}")
    for line in report.failed:
        print(f"BROKEN  {line}")
    return 2 if report.failed else 0


def run_new(args: argparse.Namespace) -> int:
    """Write the files and print what to do with them."""
    from pathlib import Path

    from polyturn.environments.new import class_name, new_environment

    folder = Path(args.out)
    for path in new_environment(args.name, folder, force=args.force):
        print(f"wrote   {path}")
    print("\nnext:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {folder}")
    print(f"  polyturn env check {args.name}:{class_name(args.name)}")
    print(f"  pytest test_{args.name}.py")
    print(f"  polyturn train {args.name}.yaml")
    print(f"\nin a recipe of yours:\n  environment:\n    id: {args.name}:{class_name(args.name)}")
    return 0
