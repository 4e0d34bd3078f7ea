"""One file of another tool, against a recipe or on its own: what it sets here, in words and as YAML."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from polyturn.config.load import load_recipe
from polyturn.config.schema import EnvironmentSection, ModelSection, Recipe
from polyturn.config.taken import Taken, shown
from polyturn.convert.accelerate import from_accelerate, ranks_of_yaml
from polyturn.convert.deepspeed import from_deepspeed, ranks_of_batch
from polyturn.convert.foreign import read_foreign
from polyturn.convert.part import Ledger, Part
from polyturn.convert.strategies import Context
from polyturn.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a file sets, and what it says that has no counterpart here."""

    source: str
    taken: tuple[Taken, ...]
    notes: tuple[str, ...]

    def sentences(self) -> list[str]:
        """Every decision, a sentence a line."""
        return [*map(str, self.taken), *self.notes]

    def yaml(self) -> str:
        """The keys as a piece of a recipe, each under a comment that says where it comes from; then the notes as comments."""
        tree = CommentedMap()
        for taken in self.taken:
            section, name = taken.key
            inner = tree.setdefault(section, CommentedMap())
            inner[name] = taken.value
            why = f"{taken.place}: {taken.said}{f' ({taken.why})' if taken.why else ''}"
            inner.yaml_set_comment_before_after_key(name, before=why, indent=2)
        text = io.StringIO()
        writer = YAML()
        writer.width = 1_000_000
        if tree:
            writer.dump(tree, text)
        return text.getvalue() + "".join(f"# {note}\n" for note in self.notes)


def convert(
    path: str | Path, recipe: Recipe | None = None, *, started: int | None = None, starts_here: bool = False
) -> Converted:
    """Read the accelerate YAML or DeepSpeed JSON at `path` against `recipe`, with the command line's overrides in it.

    `started`: ranks that another program has started; `starts_here`: they are about to be started on this machine. Raises
    ConfigError with a sentence for everything that can't be had.
    """
    foreign = read_foreign(path)
    kind = foreign.kind()
    ledger = Ledger()
    top = Part(foreign, ledger)
    recipe = recipe or Recipe(model=ModelSection(path="builtin:tiny"), environment=EnvironmentSection(id="lookup"))
    written = recipe.trainer.num_ranks if "num_ranks" in recipe.trainer.model_fields_set else None
    own = (ranks_of_yaml if kind == "accelerate" else ranks_of_batch)(Part(foreign, Ledger()))
    ranks = started or written or own or recipe.trainer.num_ranks
    settled = bool(started or written or (own and kind == "accelerate"))
    context = Context(recipe=recipe, started=started, starts_here=starts_here, ranks=ranks, says_ranks=settled)
    (from_accelerate if kind == "accelerate" else from_deepspeed)(top, context)
    ledger.problems += _said_twice(ledger.taken)
    if ledger.problems:
        raise ConfigError("\n".join(dict.fromkeys(ledger.problems)))
    for source, keys in ledger.left_open.items():
        ledger.notes.append(f"{source}: auto: the recipe decides about {', '.join(keys)}")
    return Converted(source=foreign.source, taken=_once(ledger.taken), notes=tuple(dict.fromkeys(ledger.notes)))


def load_with(
    recipe: str | Path,
    overrides: Sequence[str],
    file: str | Path,
    *,
    started: int | None = None,
    starts_here: bool = False,
) -> tuple[Recipe, Converted]:
    """The recipe with its overrides, and below them what `file` sets. Raises ConfigError, also where the two disagree."""
    converted = convert(file, load_recipe(recipe, overrides), started=started, starts_here=starts_here)
    return load_recipe(recipe, overrides, converted.taken), converted


def _said_twice(taken: Sequence[Taken]) -> list[str]:
    """A sentence for every key that gets two values, such as from a YAML and from the JSON that it names."""
    first: dict[Any, Taken] = {}
    problems = []
    for value in taken:
        other = first.setdefault(value.key, value)
        if other.value != value.value:
            problems.append(f"{value}, but {other.place}: {other.said} says {shown(other.value)}; keep one of the two")
    return problems


def _once(taken: Sequence[Taken]) -> tuple[Taken, ...]:
    return tuple({value.key: value for value in reversed(taken)}.values())[::-1]
