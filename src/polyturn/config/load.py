"""Reads a recipe and its overrides. Whatever is wrong comes back in one run, a sentence a line, each with its place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_origin

from pydantic import ValidationError

from polyturn.config.schema import Recipe
from polyturn.config.section import Section
from polyturn.config.sentences import kind_words, required, schema_problems
from polyturn.config.taken import Taken, shown
from polyturn.config.yaml_lines import Document, KeyPath, dotted, parse_yaml
from polyturn.errors import ConfigError, nearest

_LONGEST_OVERRIDE = 80


def load_recipe(path: str | Path, overrides: Sequence[str] = (), taken: Sequence[Taken] = ()) -> Recipe:
    """The recipe in a YAML file, with `section.key=value` overrides applied in order.

    `taken` are values of another tool's file: an override goes before them, and a recipe that says something else is refused.

    Raises ConfigError with a sentence for every mistake, one a line, each with its file and line or its override.
    """
    source = Path(path)
    document = parse_yaml(read_text(source))
    draft = _Draft(str(source), document)
    if document.broken or not draft.is_mapping():
        draft.raise_problems()
    for override in overrides:
        draft.override(override)
    for value in taken:
        draft.take(value)
    return draft.recipe()


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a value was written. `order` sorts file lines before overrides, and those before values of other files."""

    label: str
    order: tuple[int, int]


class _Draft:
    """A recipe being put together: plain values, where each came from, and the mistakes found so far."""

    def __init__(self, source: str, document: Document) -> None:
        self._source = source
        self._data: Any = document.data
        self._origins = {path: self._line(line) for path, line in document.lines.items()}
        self._problems: list[tuple[_Origin, str]] = []
        self._num_overrides = 0
        self._num_taken = 0
        for problem in document.problems:
            self._note(self._line(problem.line), problem.path, problem.sentence)

    def is_mapping(self) -> bool:
        """Whether the file holds a mapping; notes what it holds instead."""
        if self._data is None:
            needed = ", ".join(required(Recipe))
            self._note(_Origin(self._source, (0, 0)), (), f"the file is empty; a recipe needs at least {needed}")
        elif not isinstance(self._data, dict):
            hint = " (is a space missing after a colon?)" if isinstance(self._data, str) and ":" in self._data else ""
            self._note(
                self._line(1),
                (),
                f"the file holds {kind_words(self._data)}; a recipe is a mapping of sections, as in model:{hint}",
            )
        return isinstance(self._data, dict)

    def override(self, text: str) -> None:
        """Apply `section.key=value`; the value is YAML."""
        self._num_overrides += 1
        shown = text if len(text) <= _LONGEST_OVERRIDE else f"{text[:_LONGEST_OVERRIDE]}..."
        origin = _Origin(f"override {shown}", (1, self._num_overrides))
        key, equals, value = text.partition("=")
        parts = tuple(part.strip() for part in key.split("."))
        if not equals or not all(parts):
            self._note(origin, (), "an override is written section.key=value, as in rollout.group_size=8")
            return
        document = parse_yaml(value)
        for problem in document.problems:
            self._note(origin, () if document.broken else parts, problem.sentence)
        if document.broken:
            return
        holder: dict[str, Any] = self._data
        for depth, part in enumerate(parts[:-1], start=1):
            if holder.get(part) is None:
                holder[part] = {}
            inner = holder[part]
            if not isinstance(inner, dict):
                self._note(origin, (), f"{dotted(parts[:depth])} is {kind_words(inner)} and has no keys; override it itself")
                return
            holder = inner
        holder[parts[-1]] = document.data
        stale = [path for path in self._origins if path[: len(parts)] == parts]
        for path in stale:
            del self._origins[path]
        self._origins[parts] = origin

    def take(self, taken: Taken) -> None:
        """Put in a value of another tool's file, unless an override has decided. Notes what the recipe says otherwise."""
        self._num_taken += 1
        *outer, last = taken.key
        holder: Any = self._data
        for part in outer:
            if holder.get(part) is None:
                holder[part] = {}
            holder = holder[part]
            if not isinstance(holder, dict):
                return  # the schema says so
        written = holder.get(last)
        if written is None:
            holder[last] = taken.value
            self._origins[taken.key] = _Origin(taken.place, (2, self._num_taken))
        elif written != taken.value and not taken.implied:
            origin = self._origin(taken.key)
            if origin.order[0] != 1:
                self._problems.append(
                    (
                        _Origin(taken.place, (2, self._num_taken)),
                        f"{taken}, but {origin.label} says {shown(written)}; take one of the two out, or decide on the command "
                        f"line, with {taken.assignment}",
                    )
                )

    def recipe(self) -> Recipe:
        """The checked recipe. Raises ConfigError with everything that was found."""
        found: Recipe | None = None
        try:
            found = Recipe.model_validate(_without_empty_sections(Recipe, self._data))
        except ValidationError as error:
            for path, sentence in schema_problems(error):
                self._note(self._origin(path), path, sentence)
        if found is None or self._problems:
            self.raise_problems()
        return found

    def raise_problems(self) -> NoReturn:
        """Raise what was noted so far, in the order of the file, then of the overrides."""
        ordered = sorted(self._problems, key=lambda problem: problem[0].order)
        raise ConfigError("\n".join(dict.fromkeys(sentence for _, sentence in ordered)))

    def _note(self, origin: _Origin, path: KeyPath, sentence: str) -> None:
        name = dotted(path)
        named = not name or origin.label.startswith(f"override {name}=")
        self._problems.append((origin, f"{origin.label}: {sentence}" if named else f"{origin.label}: {name}: {sentence}"))

    def _line(self, line: int) -> _Origin:
        return _Origin(f"{self._source}:{line}", (0, line))

    def _origin(self, path: KeyPath) -> _Origin:
        """Where `path` was written, or the nearest section around it, or the file as a whole."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
        return _Origin(self._source, (0, 0))


def _without_empty_sections(section: type[Section], data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with `rollout:` and nothing below it taken as a section of defaults, which is what its writer means."""
    filled = dict(data)
    for name, field in section.model_fields.items():
        inner, value = field.annotation, filled.get(name)
        if inspect.isclass(inner) and issubclass(inner, Section):
            if name in filled and (value is None or isinstance(value, dict)):
                filled[name] = _without_empty_sections(inner, value or {})
        elif get_origin(inner) is dict and name in filled and value is None:
            filled[name] = {}
    return filled


def read_text(path: Path, patterns: Sequence[str] = ("*.yaml", "*.yml")) -> str:
    """The text of a file that a user names; files beside it like `patterns` are what may be meant.

    Raises ConfigError with what is wrong with the file.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        near = sorted(found.name for pattern in patterns for found in path.parent.glob(pattern))
        hint = nearest(path.name, near) if near else "check the path"
        raise ConfigError(f"{path}: no such file; {hint}") from None
    except IsADirectoryError:
        inside = path / "recipe.yaml"
        hint = f"give {inside}" if inside.exists() else "give the recipe file in it"
        raise ConfigError(f"{path}: a folder, not a file; {hint}") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); check the path and its permissions") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{raw[error.start]:02X}"
        raise ConfigError(
            f"{path}:{line}: not valid UTF-8: {byte}; the file may be Latin-1 (Windows-1252), save it as UTF-8"
        ) from None


def parse_assignments(pairs: Sequence[str]) -> dict[str, Any]:
    """`["level=maze", "max_hops=3"]` as `{"level": "maze", "max_hops": 3}`; values are YAML. Raises ConfigError."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{pair}: an argument is written key=value, as in level=maze")
        document = parse_yaml(value)
        if document.problems:
            raise ConfigError(f"{pair}: {document.problems[0].sentence}")
        values[key.strip()] = document.data
    return values
