"""The arguments that every verb with a recipe shares."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyturn.config.schema import Recipe


def add_recipe(parser: argparse.ArgumentParser, *more: tuple[str, str, str]) -> None:
    """`RECIPE [more ...] [section.key=value ...]`; each of `more` is name, metavar and help of a positional argument."""
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="the recipe to run")
    for name, metavar, words in more:
        parser.add_argument(name, metavar=metavar, help=words)
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="settings that replace the recipe's")


def read_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe with its overrides. Raises ConfigError."""
    from polyturn.config.load import load_recipe

    return load_recipe(args.recipe, args.overrides)
