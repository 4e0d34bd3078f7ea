"""A mapping of another tool's file, read key by key. Whatever nobody asked for is refused at the end as unknown."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyturn.config.sentences import kind_words
from polyturn.config.taken import Taken, shown
from polyturn.config.yaml_lines import KeyPath, dotted
from polyturn.convert.foreign import Foreign
from polyturn.errors import nearest

_LONGEST_VALUE = 60
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(slots=True)
class Ledger:
    """What was decided about the keys of a file, or of one and another that it names."""

    taken: list[Taken] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """A sentence for each key that changes nothing, with its place."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each that can't be had, with its place."""
    left_open: dict[str, dict[str, None]] = field(default_factory=dict)
    """Keys that are `auto`, by file: the recipe decides."""


class Part:
    """One mapping of `foreign`, at `path`. Every value that is asked for counts as seen."""

    def __init__(self, foreign: Foreign, ledger: Ledger, data: Mapping[str, Any] | None = None, path: KeyPath = ()) -> None:
        self.foreign, self.ledger, self.path = foreign, ledger, path
        self._data = foreign.data if data is None else data
        self._seen: set[str] = set()
        self._known: set[str] = set()
        self._inner: list[Part] = []

    def has(self, name: str) -> bool:
        """Whether the file gives it a value."""
        return self._data.get(name) is not None

    def part(self, name: str) -> Part:
        """The mapping below `name`; an empty one where there is none. Notes anything else as a problem."""
        value = self._value(name)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(name, f"this is {kind_words(value)}, and a mapping of keys is needed; give one, or leave it out")
            value = None
        inner = Part(self.foreign, self.ledger, value or {}, (*self.path, name))
        self._inner.append(inner)
        return inner

    def number(self, name: str, *, least: float = 0.0) -> float | None:
        """A finite number from `least` on; None where it is missing, `auto` or, with a problem noted, something else."""
        value = self._unless_auto(name)
        if isinstance(value, str):  # YAML 1.1 readers write some numbers so
            with contextlib.suppress(ValueError):
                value = float(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(name, f"this is {kind_words(value)}, and a number is needed; give one, or leave it out")
            return None
        if value < least:
            self.refuse(name, f"a number of {least:g} or more is needed; give one, or leave it out")
            return None
        return value

    def whole(self, name: str, *, least: int = 1) -> int | None:
        """A whole number from `least` on; as `number`."""
        value = self.number(name, least=least)
        if value is None or float(value).is_integer():
            return None if value is None else int(value)
        self.refuse(name, "a whole number is needed; give one, or leave it out")
        return None

    def flag(self, name: str) -> bool | None:
        """A truth value, also as a word; as `number`."""
        value = self._unless_auto(name)
        if isinstance(value, str):
            value = _FLAGS.get(value.lower(), value)
        if value is None or isinstance(value, bool):
            return value
        self.refuse(name, f"this is {kind_words(value)}, and true or false is needed; give one, or leave it out")
        return None

    def word(self, name: str, choices: Sequence[str] = ()) -> str | None:
        """A text, one of `choices` in its writing where there are some; as `number`."""
        value = self._unless_auto(name)
        if value is None:
            return None
        text = str(value).strip()
        if isinstance(value, Mapping | list) or not text:
            self.refuse(name, f"this is {kind_words(value)}, and a word is needed; give one, or leave it out")
            return None
        if not choices:
            return text
        same = {choice.lower(): choice for choice in choices}
        found = same.get(text.lower())
        if found is None:
            self.refuse(name, f"no such value; {nearest(text, choices)}")
        return found

    def numbers(self, name: str, count: int) -> list[float] | None:
        """A list of `count` finite numbers; as `number`."""
        value = self._unless_auto(name)
        if value is None:
            return None
        good = isinstance(value, list) and len(value) == count
        if not good or not all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
            self.refuse(name, f"a list of {count} numbers is needed; give one, or leave it out")
            return None
        return [float(item) for item in value]

    def see_all(self) -> None:
        """Take every key as seen: something above them is refused already."""
        self._seen.update(self._data)

    def take(self, name: str, key: str, value: Any, why: str = "", *, implied: bool = False) -> None:
        """Give `key` of the recipe a value, because of `name`."""
        self._seen.add(name)
        self.ledger.taken.append(
            Taken(
                key=tuple(key.split(".")),
                value=value,
                place=self.place(name),
                said=self.said(name),
                why=why,
                implied=implied,
            )
        )

    def replace(self, name: str, key: str, value: Any, why: str) -> None:
        """As `take`, in place of what the same file has said of `key` before."""
        path = tuple(key.split("."))
        self.ledger.taken[:] = [taken for taken in self.ledger.taken if taken.key != path]
        self.take(name, key, value, why)

    def note(self, name: str, sentence: str) -> None:
        """Say that `name` changes nothing here, and why."""
        self._seen.add(name)
        self.ledger.notes.append(f"{self.place(name)}: {self.said(name)}: {sentence}")

    def refuse(self, name: str, sentence: str) -> None:
        """Say that what `name` asks for can't be had, and what to do."""
        self._seen.add(name)
        self.ledger.problems.append(f"{self.place(name)}: {self.said(name)}: {sentence}")

    def pass_over(self, names: Iterable[str], because: str) -> None:
        """Name those of `names` that the file has, in one sentence that says why nothing here answers to them."""
        names = list(names)
        self._known.update(names)
        found = [name for name in names if name in self._data]
        self._seen.update(found)
        if found:
            keys = ", ".join(dotted((*self.path, name)) for name in found)
            self.ledger.notes.append(f"{self.place(found[0])}: {keys}: {because}")

    def must_be_off(self, names: Iterable[str], fix: str) -> None:
        """Refuse those of `names` that the file switches on: a truth, a number but 0 or 1, a mapping that is `enabled`."""
        for name in names:
            value = self._value(name)
            if isinstance(value, Mapping):
                value = value.get("enabled", bool(value))
            if value not in (None, False, 0, 1, [], "") or value is True:
                if isinstance(value, str) and _FLAGS.get(value.lower()) is False:
                    continue
                self.refuse(name, f"nothing here does that; {fix}")

    def close(self, whose: str) -> None:
        """Refuse what nobody asked for, here and below, as no key of `whose`."""
        for name in self._data:
            if name not in self._seen:
                self.refuse(name, f"unknown key of {whose}, {nearest(name, self._seen | self._known)}")
        for inner in self._inner:
            inner.close(whose)

    def place(self, name: str) -> str:
        """File and line of `name`."""
        return self.foreign.place((*self.path, name))

    def said(self, name: str) -> str:
        """Key and value as they stand in the file."""
        value = self._data.get(name)
        text = "{...}" if isinstance(value, Mapping) else shown(value) if name in self._data else "left out"
        said = f"{dotted((*self.path, name))}: {text if len(text) <= _LONGEST_VALUE else f'{text[:_LONGEST_VALUE]}...'}"
        return "".join(letter if letter.isprintable() else "?" for letter in said)

    def _value(self, name: str) -> Any:
        self._seen.add(name)
        return self._data.get(name)

    def _unless_auto(self, name: str) -> Any:
        value = self._value(name)
        if isinstance(value, str) and value.strip().lower() == "auto":
            self.ledger.left_open.setdefault(self.foreign.source, {})[dotted((*self.path, name))] = None
            return None
        return value
