"""The arguments of verbs that go on from a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_resume(parser: argparse.ArgumentParser) -> None:
    """`[--resume [PATH]] [--load PART]`."""
    parser.add_argument(
        "--resume",
        metavar="PATH",
        nargs="?",
        const="",
        help="go on with the newest run of this recipe's name, or with the run in PATH; a checkpoint as PATH starts a new run",
    )
    parser.add_argument(
        "--load",
        choices=("model", "model+optimizer", "all"),
        default="all",
        help="how much of the checkpoint in PATH the new run takes",
    )


def resume_given(args: argparse.Namespace) -> str | None:
    """What --resume was given, None without the option. An override that follows it is one all the same.

    Raises ConfigError for --load alone.
    """
    from polyturn.errors import ConfigError

    given: str | None = args.resume
    if given is None and args.load != "all":
        raise ConfigError(f"--load={args.load} says how much of a checkpoint to take; name it with --resume PATH")
    if given and "=" in given and "://" not in given and not Path(given).exists():
        args.overrides.insert(0, given)
        return ""
    return given
