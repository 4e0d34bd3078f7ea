"""YAML text to plain values with the line of every key, and each mistake as a sentence.

YAML 1.2: `1e-6` is a number, `no` is text. What readers of YAML disagree about is refused instead of guessed: a key given
twice, a number with a leading zero.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

KeyPath: TypeAlias = "tuple[str | int, ...]"

_TAG = "tag:yaml.org,2002:"
_TRUE = {"true", "yes", "on", "y"}
_MOST_VALUES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A mistake: the line it is on (1 is the first), the key it is about (empty where there is none), and the sentence."""

    line: int
    path: KeyPath = ()
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a text holds. `lines` has the line of every key and list item; a `broken` one is no YAML at all."""

    data: Any
    lines: dict[KeyPath, int]
    problems: tuple[Problem, ...]
    broken: bool = False


def dotted(path: KeyPath) -> str:
    """`("trainer", "betas", 1)` as a person writes it: `trainer.betas[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse_yaml(text: str) -> Document:
    """Read one YAML document. Never raises: mistakes come back as problems."""
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        return Document(data=None, lines={}, problems=(_syntax_problem(error, text),), broken=True)
    except RecursionError:
        deep = Problem(line=1, sentence="not a recipe: values are nested hundreds of levels deep; flatten them")
        return Document(data=None, lines={}, problems=(deep,), broken=True)
    reader = _Reader()
    data = None if node is None else reader.value(node, ())
    return Document(data=data, lines=reader.lines, problems=tuple(reader.problems))


class _Reader:
    """Turns nodes into values, noting lines and problems on the way."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self._num_values = 0

    def value(self, node: Node, path: KeyPath) -> Any:
        """The value of `node`; None, with a problem noted, where it has none."""
        self._num_values += 1
        if id(node) in self._open or self._num_values > _MOST_VALUES:
            if self._num_values <= _MOST_VALUES + 1:
                self._note(node, path, "an alias (*name) repeats itself without end; write the value out")
            self._num_values = max(self._num_values, _MOST_VALUES + 1)
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
            if isinstance(node, SequenceNode):
                return self._sequence(node, path)
            return self._scalar(node, path) if isinstance(node, ScalarNode) else None
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if (
                not isinstance(key_node, ScalarNode)
                or not isinstance(key, str)
                or _kind(key_node) in ("int", "float", "bool", "null")
            ):
                self._note(key_node, path, f"the key {_source(key_node)} is not text; quote it")
                continue
            if key == "<<":
                self._note(key_node, path, "merge keys (<<) are not supported; write the keys out")
                continue
            here = (*path, key)
            if key in values:
                self._note(key_node, here, f"given twice (line {self.lines[here]} and line {line}); keep one")
                continue
            self.lines[here] = line
            values[key] = self.value(value_node, here)
        return values

    def _sequence(self, node: SequenceNode, path: KeyPath) -> list[Any]:
        values = []
        for index, item in enumerate(node.value):
            here = (*path, index)
            self.lines[here] = item.start_mark.line + 1
            values.append(self.value(item, here))
        return values

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        kind, text = _kind(node), str(node.value)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() in _TRUE
        if kind == "int":
            return self._whole_number(node, path, text)
        if kind == "float":
            return self._number(node, path, text)
        if kind not in ("str", "timestamp", "merge", "value"):
            self._note(node, path, f"the tag {_tag(node)} means nothing here; remove it")
        return text

    def _whole_number(self, node: ScalarNode, path: KeyPath, text: str) -> int | str:
        digits = text.replace("_", "")
        if re.fullmatch(r"[-+]?0[0-9]+", digits):
            plain = int(digits)
            self._note(
                node, path, f"{text} has a leading zero, octal to some YAML readers; write {plain}, or '{text}' for text"
            )
            return plain
        try:
            return int(digits, 0)
        except ValueError:
            return text

    def _number(self, node: ScalarNode, path: KeyPath, text: str) -> float | str:
        try:
            number = float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.replace("_", "").lower()))
        except ValueError:
            return text
        if not math.isfinite(number):
            self._note(node, path, f"{text} is not a finite number; give one")
            return 1.0
        return number

    def _note(self, node: Node, path: KeyPath, sentence: str) -> None:
        self.problems.append(Problem(line=node.start_mark.line + 1, path=path, sentence=sentence))


def _tag(node: Node) -> str:
    return str(node.tag)


def _kind(node: Node) -> str:
    """`int`, `str` ... or the whole tag where YAML itself does not define it."""
    return _tag(node).removeprefix(_TAG)


def _source(node: Node) -> str:
    """A key as it stands in the file, as far as one line can show it."""
    return str(node.value) if isinstance(node, ScalarNode) else "[...]" if isinstance(node, SequenceNode) else "{...}"


def _syntax_problem(error: YAMLError, text: str) -> Problem:
    """One sentence for a text that is no YAML, at the line where a person would look."""
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        return Problem(line=line, sentence=f"not valid YAML: the control character U+{code:04X}; remove it")
    if not isinstance(error, MarkedYAMLError):
        return Problem(line=1, sentence=f"not valid YAML: {' '.join(str(error).split())}")
    mark = error.problem_mark or error.context_mark
    line = 1 if mark is None else mark.line + 1
    opened = line if error.context_mark is None else error.context_mark.line + 1
    problem, context = str(error.problem or ""), str(error.context or "")
    source = text.split("\n")[line - 1] if line <= text.count("\n") + 1 else ""
    indent = source[: len(source) - len(source.lstrip())]
    if "\t" in indent:
        return Problem(
            line=line, sentence="a tab is used to indent; YAML allows only spaces: put two spaces in place of each tab"
        )
    if "another document" in problem:
        return Problem(line=line, sentence="a second document starts here; a recipe is one document: remove the '---'")
    if "mapping values are not allowed" in problem:
        return Problem(line=line, sentence="a ': ' where no key can stand; quote the value, or mend the indentation")
    if "quoted scalar" in context:
        return Problem(line=opened, sentence="the quote that opens here is never closed; close it")
    if "flow sequence" in context or "flow mapping" in context:
        bracket = "[" if "sequence" in context else "{"
        return Problem(
            line=opened,
            sentence=f"the '{bracket}' that opens here is not closed by line {line}; close it, items apart by commas",
        )
    if found := re.match(r"found character '(.)' that cannot start", problem):
        return Problem(line=line, sentence=f"a value can't start with '{found[1]}'; quote it")
    return Problem(line=line, sentence=f"not valid YAML: {problem or context}")
