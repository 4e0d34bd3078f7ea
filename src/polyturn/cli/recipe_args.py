"""The arguments that every verb with a recipe shares."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyturn.config.schema import Recipe


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """`RECIPE [section.key=value ...]`."""
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="the recipe to run")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="settings that replace the recipe's")


def read_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe with its overrides. Raises ConfigError."""
    from polyturn.config.load import load_recipe

    return load_recipe(args.recipe, args.overrides)
