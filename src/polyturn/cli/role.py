"""`polyturn role NAME --config FILE`: one process of a run. `polyturn train` and `polyturn launch` start it."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyturn.processes.role import Role


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "role",
        help="be one process of a run; train and launch start these",
        description="Be one process of a run. What it must know besides stands in its environment.",
    )
    parser.add_argument("name", metavar="NAME", help="trainer-agent, trainer-0, engine-0, environment-0 and so on")
    parser.add_argument("--config", metavar="FILE", required=True, help="the resolved recipe")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Take its place in the run, then play the role."""
    from polyturn.processes.parents import die_with_starter
    from polyturn.processes.role import Role

    die_with_starter()
    rank = _rank(args.name)
    role = Role.from_environment(args.name if rank is None else f"trainer-{rank}")
    if rank is not None:
        _become_rank(role)

    from polyturn.config.load import load_recipe
    from polyturn.metrics.logs import set_up_logging

    recipe = load_recipe(args.config)
    set_up_logging(recipe.run.log_level)

    from polyturn.loop.roles import run_role

    return run_role(role, recipe)


def _rank(name: str) -> str | None:
    """Which rank of the run this is, where torchrun's agent started it: it gave it the number within its machine."""
    started_by_agent = "TORCHELASTIC_RUN_ID" in os.environ and re.fullmatch(r"trainer-\d+", name)
    return os.environ.get("RANK") if started_by_agent else None


def _become_rank(role: Role) -> None:
    """Take the log and the GPU of one rank; what the agent has of both, it gave to all of them."""
    from polyturn.processes.starting import redirect_output

    redirect_output(role.folder / "logs" / f"{role.name}.log")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["LOCAL_RANK"])]
        os.environ["LOCAL_RANK"] = "0"  # which is the number of its GPU among those it sees
