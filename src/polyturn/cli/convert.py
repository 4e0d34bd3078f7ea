"""`polyturn convert FILE [--recipe RECIPE.yaml]`: what an accelerate YAML or a DeepSpeed JSON sets here."""

from __future__ import annotations

import argparse
from typing import Any


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "convert",
        help="show what another tool's file sets here",
        description="Print the keys of a recipe that an accelerate YAML or a DeepSpeed JSON sets, and what it says in vain.",
    )
    parser.add_argument("file", metavar="FILE", help="an accelerate YAML or a DeepSpeed JSON")
    parser.add_argument("--recipe", metavar="RECIPE.yaml", help="read it against this recipe, and refuse what disagrees")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a piece of a recipe, with comments."""
    from polyturn.convert.convert import convert, load_with

    found = convert(args.file) if args.recipe is None else load_with(args.recipe, (), args.file)[1]
    print(found.yaml(), end="")
    return 0
