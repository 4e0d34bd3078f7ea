"""JSON as people write it: strict reading, and a sentence for every way it goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

KIND_WORDS = {bool: "a truth value", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
_PYTHON_WORDS = re.compile(r"(None|True|False)\b")
_CONSTANT = "is no JSON number"
_LONE = re.compile("[\ud800-\udfff]")


class BadJson(ValueError):
    """Text that is no strict JSON. `position` counts characters from 0, None where nothing points to a place.

    `end` is where the value ends, for one that other readers would take.
    """

    def __init__(self, reason: str, position: int | None = None, *, end: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position
        self.end = end


def kind_word(value: object) -> str:
    """What a JSON value is: `null`, `true`, `a number`, `a list`, ..."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return KIND_WORDS.get(type(value), f"a {type(value).__name__}")


class JsonReader:
    """Reads JSON values and refuses what other readers pass over: a key given twice, NaN, half a surrogate pair."""

    def __init__(self) -> None:
        self._twice: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._pairs, parse_constant=self._constant)

    def read(self, text: str, *, cut_off: bool = False) -> Any:
        """The one value that `text` is. With `cut_off` nothing follows the text, not even a line end.

        Raises BadJson.
        """
        value, end = self.read_at(text, len(text) - len(text.lstrip()), cut_off=cut_off)
        rest = text[end:].lstrip()
        if rest:
            raise BadJson(*_extra(text, rest))
        return value

    def read_at(self, text: str, start: int, *, cut_off: bool = False) -> tuple[Any, int]:
        """The value that starts at `start`, and where it ends. Raises BadJson."""
        self._twice.clear()
        try:
            value, end = self._decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise _explained(text, error, cut_off) from None
        except RecursionError:
            raise BadJson("not valid JSON: it is nested too deeply") from None
        except ValueError as error:
            reason = str(error) if _CONSTANT in str(error) else "a number of thousands of digits; write it as a string"
            raise BadJson(f"not valid JSON: {reason}") from None
        problems = [f"the key {key!r} is given twice in one object" for key in dict.fromkeys(self._twice)]
        problems += _surrogates(value) if "\\u" in text else []
        if problems:
            raise BadJson("; ".join(problems), end=end)
        return value, end

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            self._twice += [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        return made

    @staticmethod
    def _constant(name: str) -> Any:
        raise ValueError(f"{name} {_CONSTANT}; write null, or leave the field out")


def _explained(text: str, error: json.JSONDecodeError, cut_off: bool) -> BadJson:
    position, found = error.pos, text[error.pos : error.pos + 1]
    before = text[:position].rstrip()
    if error.msg.startswith("Unterminated string"):
        ends = "the file looks cut off (no newline at its end)" if cut_off else "a closing quote is missing"
        return BadJson(f"not valid JSON: the string that starts at column {error.colno} never ends; {ends}", position)
    if error.msg.startswith("Illegal trailing comma"):
        position, found, before = position + 1, text[position + 1 :].lstrip()[:1], text[: position + 1]
    if before.endswith(",") and found in ("}", "]"):
        bracket = "brace" if found == "}" else "bracket"
        return BadJson(f"not valid JSON: a comma before the closing {bracket}; remove it", len(before) - 1)
    if not text[position:].strip():
        why = "the file looks cut off (no newline at its end)" if cut_off else "a closing brace or bracket is missing"
        return BadJson(f"not valid JSON: it ends too early; {why}", position)
    if found == "\ufeff":
        return BadJson("not valid JSON: a byte order mark inside the file; remove it", position)
    if found == "'":
        return BadJson("not valid JSON: single quotes; JSON has double quotes", position)
    word = _PYTHON_WORDS.match(text, position)
    if word:
        written = "null" if word[1] == "None" else word[1].lower()
        return BadJson(f"not valid JSON: {word[1]} is Python; JSON writes {written}", position)
    if error.msg.startswith("Invalid control character"):
        return BadJson("not valid JSON: a line end or control character inside a string; write it as \\n or \\u00XX", position)
    return BadJson(f"not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}, found {found!r}", position)


def _extra(text: str, rest: str) -> tuple[str, int]:
    position = text.rindex(rest)
    if rest.startswith(","):
        return "not valid JSON: a comma after the object; one object a line has no commas between the lines", position
    if rest.startswith("{"):
        return "two objects on one line; write each on a line of its own", position
    return f"not valid JSON: text after the value, found {rest[:20]!r}", position


def _surrogates(value: Any, path: str = "") -> list[str]:
    """A sentence for every text in `value` that holds half a surrogate pair."""
    return [
        f"{where or 'the text'!r} holds a lone surrogate (\\u{ord(match[0]):04x}), which cannot be written as UTF-8"
        for where, text in _texts(value, path)
        if (match := _LONE.search(text))
    ]


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if _LONE.search(key):
                yield "a field's name", key
            else:
                yield from _texts(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{path}[{index}]")
