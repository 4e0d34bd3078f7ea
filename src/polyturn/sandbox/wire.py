"""Values between the tests and the program: data only, in JSON, and every value comes back as exactly the type it was.

A JSON array is a tag and its content, everything else is itself. Decoding builds builtin and standard-library types alone, so a
value that arrives has no code of the sender in it: its `==` is Python's. What is not data travels as a handle, a number that
means something to its owner only; the tables of handles belong to `remote`.

    [1, (2, "a")]      ["l",1,["t",2,"a"]]            {3: None}       ["d",3,null]
    {1.5}              ["s",1.5]                      2 ** 70         ["I","0x400000000000000000"]

Lists, dicts, sets, bytearrays and deques are numbered in the order they are met, so that one met twice is one on the other side
(["r", number]), and so that what a call does to its arguments can be told.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

from polyturn.sandbox.proxies import runs_code

Tree: TypeAlias = Any
"""What JSON can hold."""

MOST_BYTES = 8 << 20
"""Of one message, either way."""
MOST_DEPTH = 200

_PLAIN_INT = 1 << 62
_CONTAINERS = (list, dict, set, bytearray, deque)
_DATES = (datetime.datetime, datetime.date, datetime.time)
_NOT_DATA: Any = object()


class WireError(Exception):
    """A value that can't be carried, or bytes that are no value."""


class Handles(Protocol):
    """The tables of one side: what goes by handle, and what handles of the other side stand for."""

    def export(self, value: object) -> Tree:
        """The tree of a value that is not data. Raises WireError when it must not leave."""

    def resolve(self, tree: list[Tree]) -> object:
        """The object that a handle stands for. Raises WireError when it is unknown."""


class Scope:
    """The containers of one call and its answer, by number."""

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self._numbers: dict[int, int] = {}

    def add(self, container: object) -> None:
        """Give a container the next number."""
        self._numbers[id(container)] = len(self.containers)
        self.containers.append(container)

    def number(self, container: object) -> int | None:
        """Its number, None when it is new."""
        return self._numbers.get(id(container))


def dumps(tree: Tree) -> bytes:
    """A tree as bytes. Raises WireError when they are too many."""
    data = json.dumps(tree, separators=(",", ":")).encode()
    if len(data) > MOST_BYTES:
        raise WireError(f"a value of {len(data)} bytes is more than tests and program may exchange at once ({MOST_BYTES})")
    return data


def loads(data: bytes) -> Tree:
    """The tree of bytes from anywhere. Raises WireError when they are none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from None


def encode(value: object, scope: Scope, handles: Handles, depth: int = 0) -> Tree:
    """The tree of a value. Raises WireError when it nests too deep or can't be carried."""
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -_PLAIN_INT < value < _PLAIN_INT else ["I", hex(value)]  # type: ignore[operator,arg-type]
    if depth > MOST_DEPTH:
        raise WireError(f"a value nests deeper than {MOST_DEPTH} levels")
    if isinstance(value, _CONTAINERS):
        number = scope.number(value)
        if number is not None:
            return ["r", number]
        scope.add(value)
        return encode_content(value, scope, handles, depth)
    return _encode_fixed(value, lambda part: encode(part, scope, handles, depth + 1), handles)


def encode_content(value: Any, scope: Scope, handles: Handles, depth: int = 0) -> Tree:
    """The tree of a container that has its number already. Subclasses of the program's own become what they extend."""

    def each(parts: Iterable[Any]) -> list[Tree]:
        return [encode(part, scope, handles, depth + 1) for part in parts]

    if isinstance(value, list):
        return ["l", *each(list.__iter__(value))]
    if isinstance(value, dict):
        pairs = [part for pair in dict.items(value) for part in pair]
        tag = {Counter: "C", OrderedDict: "O", defaultdict: "D"}.get(type(value), "d")
        return [tag, *each(pairs)]
    if isinstance(value, set):
        return ["s", *each(set.__iter__(value))]
    if isinstance(value, bytearray):
        return ["B", bytes(value).decode("latin-1")]
    return ["q", deque.maxlen.__get__(value), *each(deque.__iter__(value))]


def decode(tree: Tree, scope: Scope, handles: Handles) -> Any:
    """The value of a tree. Raises WireError for a tree that is no value; never runs code of the sender."""
    try:
        return _decode(tree, scope, handles)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"not a value: {type(error).__name__}: {error}") from None


def refill(container: Any, tree: Tree, scope: Scope, handles: Handles) -> None:
    """Give a container the content that a tree says it has now."""
    if not isinstance(tree, list) or not tree:
        raise WireError("not a container")
    try:
        parts = [_decode(part, scope, handles) for part in tree[1:]]
        if isinstance(container, list) and tree[0] == "l":
            container[:] = parts
        elif isinstance(container, dict) and tree[0] in "dCOD":
            fresh = dict(_pairs(parts))
            container.clear()
            container.update(fresh)
        elif isinstance(container, set) and tree[0] == "s":
            fresh_set = set(parts)
            container.clear()
            container.update(fresh_set)
        elif isinstance(container, bytearray) and tree[0] == "B":
            container[:] = parts[0].encode("latin-1")
        elif isinstance(container, deque) and tree[0] == "q":
            container.clear()
            container.extend(parts[1:])
        else:
            raise WireError(f"{tree[0]!r} is no content of {type(container).__name__}")
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"not a container: {type(error).__name__}: {error}") from None


def shared_exception(module: object, name: object) -> type[BaseException] | None:
    """An exception of the standard library that this process has loaded already, by module and name; None for anything else.

    Not those by which a program could have a test skipped.
    """
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    package = module.partition(".")[0]
    if package not in sys.stdlib_module_names or package in ("unittest", "doctest", "test"):
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def is_shared_exception(value: object) -> bool:
    """Whether it is an exception class of the standard library."""
    return isinstance(value, type) and shared_exception(value.__module__, value.__qualname__) is value


def _encode_fixed(value: Any, inner: Callable[[Any], Tree], handles: Handles) -> Tree:
    """The tree of a value that can't change. Subclasses of the program's own become the builtin that they extend."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return inner(int.__index__(value))
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, tuple):
        fields = getattr(type(value), "_fields", None)
        parts = [inner(part) for part in tuple.__iter__(value)]
        if isinstance(fields, tuple) and len(fields) == len(parts):
            return ["N", type(value).__name__, len(fields), *fields, *parts]
        return ["t", *parts]
    if isinstance(value, frozenset):
        return ["f", *(inner(part) for part in frozenset.__iter__(value))]
    if isinstance(value, bytes):
        return ["b", bytes.decode(value, "latin-1")]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    tree = _encode_library(value, inner)
    return handles.export(value) if tree is _NOT_DATA else tree


def _encode_library(value: Any, inner: Callable[[Any], Tree]) -> Tree:
    """Constants and types of the standard library; `_NOT_DATA` for anything else."""
    kind = type(value)
    if kind is range:
        return ["R", inner(value.start), inner(value.stop), inner(value.step)]
    if kind is slice:
        return ["S", inner(value.start), inner(value.stop), inner(value.step)]
    if value is Ellipsis or value is NotImplemented:
        return ["e", value is Ellipsis]
    if kind is decimal.Decimal:
        return ["m", str(value)]
    if kind is fractions.Fraction:
        return ["F", inner(value.numerator), inner(value.denominator)]
    if kind in _DATES:
        return ["T", kind.__name__, value.isoformat()]
    if kind is datetime.timedelta:
        return ["T", "timedelta", value.days, value.seconds, value.microseconds]
    if kind in _VIEWS:
        return ["v", _VIEWS[kind], *(inner(part) for part in value)]
    if isinstance(value, BaseException) and is_shared_exception(kind):
        return ["E", kind.__module__, kind.__qualname__, *(inner(part) for part in value.args)]
    if kind is re.Pattern and isinstance(value.pattern, str):
        return ["P", value.pattern, value.flags]
    if kind is re.Match and isinstance(value.string, str):
        return [
            "M",
            value.re.pattern,
            value.re.flags,
            value.string,
            value.pos,
            value.endpos,
            *(b for pair in value.regs for b in pair),
        ]
    return _NOT_DATA


def _decode(tree: Tree, scope: Scope, handles: Handles) -> Any:
    if not isinstance(tree, list):
        if isinstance(tree, dict):
            raise WireError("an object is no value")
        return tree
    tag, parts = tree[0], tree[1:]
    if tag in ("h", "y", "x"):
        return handles.resolve(tree)
    if tag == "r":
        return scope.containers[parts[0]]
    if tag not in _NEW:
        return _DECODERS[tag](*(_decode(part, scope, handles) for part in parts))
    container: Any = _NEW[tag]() if tag != "q" else deque(maxlen=parts[0])
    scope.add(container)
    if tag == "B":
        container.extend(parts[0].encode("latin-1"))
        return container
    content = [_decode(part, scope, handles) for part in (parts[1:] if tag == "q" else parts)]
    if tag == "C":  # whose own update counts what it is given
        dict.update(container, _pairs(content))
    elif tag in "dOD":
        container.update(_pairs(content))
    elif tag == "s":
        container.update(content)
    else:
        container.extend(content)
    return container


def _pairs(parts: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


def _named_tuple(name: str, num_fields: int, *parts: Any) -> Any:
    fields, values = parts[:num_fields], parts[num_fields:]
    if any(map(runs_code, values)):  # the sender names the fields, and `f(x).startswith("a")` must not call what it chose
        raise WireError("a named tuple with a function in it can't be carried")
    return namedtuple(name, fields)(*values)


def _date(kind: str, *parts: Any) -> Any:
    if kind == "timedelta":
        return datetime.timedelta(*parts)
    return {found.__name__: found for found in _DATES}[kind].fromisoformat(*parts)


def _view(kind: str, *parts: Any) -> Any:
    if kind == "keys":
        return dict.fromkeys(parts).keys()
    return dict(enumerate(parts)).values() if kind == "values" else dict(parts).items()


def make_exception(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    """An exception with these arguments, past a constructor that may want others."""
    error = kind.__new__(kind)
    error.args = arguments
    return error


def _exception(module: str, name: str, *arguments: Any) -> BaseException:
    kind = shared_exception(module, name)
    if kind is None:
        raise WireError(f"{name!r} is no exception that is known here")
    return make_exception(kind, arguments)


def _match(pattern: str, flags: int, string: str, pos: int, endpos: int, *bounds: int) -> Any:
    """The match that this side's own search finds. Raises WireError when it is not the one that was said."""
    compiled = re.compile(pattern, flags)
    for attempt in (compiled.search, compiled.match, compiled.fullmatch):
        found = attempt(string, pos, endpos)
        if found and [bound for pair in found.regs for bound in pair] == list(bounds):
            return found
    raise WireError(f"no match of {pattern!r} is as said")


_NEW: dict[str, Callable[[], Any]] = {
    "l": list,
    "d": dict,
    "C": Counter,
    "O": OrderedDict,
    "D": defaultdict,
    "s": set,
    "B": bytearray,
    "q": deque,
}
_DECODERS: dict[str, Callable[..., Any]] = {
    "t": lambda *parts: parts,
    "f": lambda *parts: frozenset(parts),
    "b": lambda text: text.encode("latin-1"),
    "c": complex,
    "I": lambda text: int(text, 16),
    "R": range,
    "S": slice,
    "N": _named_tuple,
    "e": lambda is_ellipsis: Ellipsis if is_ellipsis else NotImplemented,
    "m": lambda text: decimal.Decimal(str(text)),
    "F": fractions.Fraction,
    "T": _date,
    "v": _view,
    "E": _exception,
    "P": re.compile,
    "M": _match,
}
_VIEWS = {
    type({}.keys()): "keys",
    type({}.values()): "values",
    type({}.items()): "items",
    type(OrderedDict().keys()): "keys",
    type(OrderedDict().values()): "values",
    type(OrderedDict().items()): "items",
}
