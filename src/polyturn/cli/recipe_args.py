"""The arguments that every verb with a recipe shares."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyturn.config.schema import Recipe


def add_recipe(parser: argparse.ArgumentParser, *more: tuple[str, str, str]) -> None:
    """`RECIPE [more ...] [section.key=value ...]`; each of `more` is name, metavar and help of a positional argument."""
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="the recipe to run")
    for name, metavar, words in more:
        parser.add_argument(name, metavar=metavar, help=words)
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="settings that replace the recipe's")
    add_from(parser)


def add_from(parser: argparse.ArgumentParser) -> None:
    """`--from FILE`."""
    parser.add_argument(
        "--from", dest="from_file", metavar="FILE", help="take settings from an accelerate YAML or DeepSpeed JSON"
    )


def read_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe with its overrides and what `--from` sets, of which it prints every decision. Raises ConfigError."""
    from polyturn.config.load import load_recipe

    if args.from_file is None:
        return load_recipe(args.recipe, args.overrides)
    from polyturn.convert.convert import load_with

    size = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    started = int(size) if size.isdigit() and int(size) else None
    starts_here = started is None and args.verb in ("train", "launch") and not args.dry_run
    recipe, converted = load_with(args.recipe, args.overrides, args.from_file, started=started, starts_here=starts_here)
    if os.environ.get("RANK", "0") == "0" and not getattr(args, "json", False):
        print("\n".join(converted.sentences()), flush=True)
    return recipe
