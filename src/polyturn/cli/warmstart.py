"""`polyturn warmstart RECIPE.yaml --out DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from polyturn.cli.recipe_args import add_recipe, read_recipe


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "warmstart",
        help="short supervised start on an environment's demonstrations",
        description="Train the recipe's model on its environment's demonstrations and save it as an ordinary model folder.",
    )
    add_recipe(parser)
    parser.add_argument("--out", metavar="DIR", required=True, help="folder for the model; must not exist yet")
    parser.add_argument("--steps", metavar="N", type=int, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--demonstrations", metavar="N", type=int, default=64, help="demonstrations a step (default 64)")
    parser.add_argument("--learning-rate", metavar="X", type=float, help="default: ten times the recipe's")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, train on demonstrations, save."""
    import asyncio

    from polyturn.config.schema import filled
    from polyturn.errors import ConfigError
    from polyturn.loop.check import check

    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"--out={out} exists already; name a new folder, nothing is overwritten")
    if args.steps < 1 or args.demonstrations < 1:
        raise ConfigError(f"--steps={args.steps} --demonstrations={args.demonstrations}; both must be 1 or more")
    if args.learning_rate is not None and not 0 < args.learning_rate < float("inf"):
        raise ConfigError(f"--learning-rate={args.learning_rate}; give a number above 0")
    checked = check(read_recipe(args))

    from polyturn.loop.build import quiet_libraries
    from polyturn.loop.commands import warmstart_model
    from polyturn.loop.warmstart import WarmstartSettings

    quiet_libraries()
    settings = WarmstartSettings(
        max_steps=args.steps,
        demonstrations_per_step=args.demonstrations,
        learning_rate=args.learning_rate or 10 * filled(checked.recipe.trainer.learning_rate),
    )
    _refuse_unwritable(out)
    result = asyncio.run(warmstart_model(checked, settings, out, say=print))
    print(f"after {result.steps} steps: nll={result.negative_log_likelihood:.4g} token_accuracy={result.accuracy.mean:.3f}")
    print(f"model: {out}")
    return 0


def _refuse_unwritable(out: Path) -> None:
    """Raise ConfigError when `out` can't be made, before anything is trained for it."""
    from polyturn.errors import ConfigError

    try:
        out.mkdir(parents=True)
        out.rmdir()
    except OSError as error:
        raise ConfigError(f"--out={out} can't be made ({error.strerror}); name another folder") from error
