"""What stands in one process for an object of the other: a number, and operations that are asked of its owner.

In the tests' process these are objects of a program that may lie about everything it is asked. One that poses as the list,
string or number that the tests expect must not be asked for the verdict (`f(x).startswith("ab")`, `abs(f(x) - 3.5) < 1e-6`),
nor answer differently each time. So it depends on what the tests make of its class how much an object answers:

| the tests do this with an object | `NOTHING` | `GUARDED` | `ANYTHING` |
| --- | --- | --- | --- |
| read an attribute, `str`, `bool` | yes | yes | yes |
| `[ ]`, `len`, `iter`, `int`, `abs` ... | raises | yes | yes |
| compare with a value of theirs | unequal; `<` raises | the same | the same |
| `in` | raises | its items are compared here | the same |
| `==` with another object of the program's | if it is the same | its class decides | its class decides |
| `<` with another object of the program's | raises | if the tests made one of them | its class decides |
| call a method | raises | yes; one that data have, too, if the tests made the object | yes |
| use an operator | raises | yes; with a value of theirs if an object comes of it, then no number | the same |
| `with` | raises | yes; it may swallow what the tests raise themselves, but no assertion | the same |

`ANYTHING` is for classes that the tests declare, `GUARDED` for names that look like a class, `NOTHING` for all others. What the
tests made, by calling its class, is kept apart from the same object when it comes back from the program.

In the program's process they stand for objects of the tests; there every operation is asked, and the tests' side refuses.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import re
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Protocol

MOST_ITEMS = 200_000
"""That an iterator of the program may give, so that an endless one ends."""
NOTHING, GUARDED, ANYTHING = range(3)
TESTS = "polyturn_tests"
"""The name of the tests' module, in their own process."""

_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_NUMERIC = "abs float int complex index round trunc floor ceil neg pos invert bool".split()
_PLAIN = "len str repr getitem reversed".split()
_OF_EVERYTHING = ("bool", "str", "repr")
_DATA_TYPES = (str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float, complex, range, memoryview, deque, Counter)
_MORE_DATA_TYPES = (datetime.datetime, datetime.timedelta, decimal.Decimal, fractions.Fraction, re.Match, re.Pattern)
_DATA_METHODS = frozenset(name for kind in (*_DATA_TYPES, *_MORE_DATA_TYPES) for name in dir(kind) if not name.startswith("_"))


class Asks(Protocol):
    """Who asks the other process."""

    guards: bool
    """Whether the other side may lie, as the program may to its tests."""

    def ask(
        self, operation: str, target: int | str, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """The result of an operation on an object, or the exception it raised."""


class Remote:
    """An object of the other process. `level` is what the tests make of its class."""

    def __init__(self, peer: Asks, number: int, kind_name: str, level: int = NOTHING) -> None:
        set_here = object.__setattr__
        set_here(self, "_peer", peer)
        set_here(self, "_number", number)
        set_here(self, "_kind_name", kind_name)
        set_here(self, "_level", level if peer.guards else ANYTHING)
        set_here(self, "_made", False)
        set_here(self, "_mixed", False)

    _peer: Asks
    _number: int
    _kind_name: str
    _level: int
    _made: bool
    _mixed: bool


def runs_code(value: object) -> bool:
    """Whether calling a value would let whoever chose it decide what comes out: `bool` is as good as a function there."""
    return isinstance(value, RemoteFunction | RemoteClass) or (callable(value) and not isinstance(value, Remote))


class RemoteFunction(Remote):
    """A function: it can be called, and nothing else."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it in the other process."""
        return self._peer.ask("call", self._number, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name in ("__name__", "__qualname__"):
            return self._peer.ask("get", self._number, (name,))
        raise AttributeError(f"{name} of a function of the program is out of the tests' reach")


class RemoteClass(Remote):
    """A class: it can be called, asked for its attributes, and stand on the right of isinstance."""

    def mean_it(self, level: int) -> None:
        """The tests name this class."""
        object.__setattr__(self, "_level", level if self._peer.guards else ANYTHING)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it in the other process. What it makes for the tests is not what comes back from the program later."""
        value = self._peer.ask("call", self._number, arguments, named)
        if not isinstance(value, RemoteObject) or self._level != GUARDED:
            return value
        made = RemoteObject(self._peer, value._number, value._kind_name, value._level)
        object.__setattr__(made, "_made", True)
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__qualname__"):
            raise AttributeError(name)
        value = self._peer.ask("get", self._number, (name,))
        if runs_code(value) and not self._level:
            raise AttributeError(_refusal(f"attribute {name}", self._kind_name))
        return value

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and self._peer.ask("op", self._number, ("hasinstance", instance)) is True

    def __subclasscheck__(self, kind: object) -> bool:
        return isinstance(kind, Remote) and self._peer.ask("op", self._number, ("hassubclass", kind)) is True


class RemoteIterator(Remote):
    """An iterator or generator, asked for one item at a time."""

    def __init__(self, peer: Asks, number: int, kind_name: str, level: int = NOTHING) -> None:
        super().__init__(peer, number, kind_name, level)
        self._left = MOST_ITEMS

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._left -= 1
        if self._left < 0:
            raise OverflowError(f"an iterator of the program gave {MOST_ITEMS} items and had no end")
        has_item, item = self._peer.ask("next", self._number)
        if has_item is not True:
            raise StopIteration
        return item


class RemoteObject(Remote):
    """Any other object, by the rules of this module's table."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._peer.ask("get", self._number, (name,))
        if not runs_code(value):
            return value
        if not self._level:
            raise AttributeError(_refusal(f"method {name}", self._kind_name))
        if self._level == GUARDED and name in _DATA_METHODS and not self._made:
            raise AttributeError(
                f"method {name}: data have one too, and this {self._kind_name} came from the program, so it could decide the "
                f"test; declare classes=({self._kind_name!r},) if the tests mean it"
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, (name, value))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it in the other process."""
        self._insist("call")
        return self._peer.ask("call", self._number, arguments, named)

    def __iter__(self) -> Iterator[Any]:
        self._insist("iter")
        found = self._op("iter")
        if not isinstance(found, RemoteIterator):
            raise TypeError(f"iter() of {self._kind_name} gave no iterator")
        return found

    def __next__(self) -> Any:
        self._insist("next")
        return self._op("next")

    def __contains__(self, item: object) -> bool:
        if self._peer.guards:
            return any(found is item or found == item for found in self)
        return bool(self._op("contains", item))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RemoteObject) and self._number == other._number:
            return True
        if self._peer.guards and not (self._level and isinstance(other, RemoteObject)):
            return False
        return self._op("eq", other) is True

    def __hash__(self) -> int:
        return int(self._op("hash")) if self._level else hash(self._number)

    def _op(self, name: str, *arguments: Any) -> Any:
        return self._peer.ask("op", self._number, (name, *arguments))

    def _insist(self, what: str) -> None:
        if not self._level:
            raise TypeError(_refusal(what, self._kind_name))


def _refusal(what: str, kind_name: str) -> str:
    return f"{what}: the tests don't name class {kind_name} of the program, so it can't be asked"


def _unary(name: str, *, numeric: bool) -> Callable[..., Any]:
    def method(self: RemoteObject, *arguments: Any) -> Any:
        if name not in _OF_EVERYTHING:
            self._insist(name)
        if numeric and self._mixed:
            raise TypeError(f"{name} of {self._kind_name} mixed with a value of the tests would let the program decide a test")
        return self._op(name, *arguments)

    return method


def _binary(name: str) -> Callable[..., Any]:
    def method(self: RemoteObject, other: Any) -> Any:
        self._insist(f"operator {name}")
        mixed = self._peer.guards and (self._mixed or not isinstance(other, RemoteObject) or other._mixed)
        result = self._op(name, other)
        if mixed and isinstance(result, RemoteObject):
            object.__setattr__(result, "_mixed", True)
        elif mixed:
            raise TypeError(f"operator {name} of {self._kind_name} and a value of the tests gave no object of the program")
        return result

    return method


def _ordering(name: str) -> Callable[..., Any]:
    def method(self: RemoteObject, other: Any) -> Any:
        if self._peer.guards and not (isinstance(other, RemoteObject) and _may_order(self, other)):
            return NotImplemented
        return self._op(name, other) is True

    return method


def _may_order(one: RemoteObject, other: RemoteObject) -> bool:
    """Whether the class may say which of two objects of the program's is the smaller one."""
    if one._level == other._level == ANYTHING:
        return True
    return bool(one._level and other._level) and (one._made or other._made) and not (one._mixed or other._mixed)


def _changing(name: str) -> Callable[..., Any]:
    def method(self: RemoteObject, *arguments: Any) -> Any:
        self._insist(name)
        return self._op(name, *arguments)

    return method


for _name in _ARITHMETIC:
    setattr(RemoteObject, f"__{_name}__", _binary(_name))
    setattr(RemoteObject, f"__r{_name}__", _binary(f"r{_name}"))
for _name in _NUMERIC:
    setattr(RemoteObject, f"__{_name}__", _unary(_name, numeric=True))
for _name in _PLAIN:
    setattr(RemoteObject, f"__{_name}__", _unary(_name, numeric=False))
for _name in ("lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _ordering(_name))
for _name in ("setitem", "delitem", "enter"):
    setattr(RemoteObject, f"__{_name}__", _changing(_name))


def _exit(self: RemoteObject, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
    """End a `with`. A class that swallows exceptions could skip the assertions of its block, so few it may."""
    self._insist("exit")
    swallows = self._op("exit", error is not None) is True
    return swallows and (not self._peer.guards or _raised_by_tests(error, trace))


def _raised_by_tests(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether it comes from a line of the tests itself, and is no assertion."""
    if trace is None or isinstance(error, AssertionError) or getattr(error, "of_program", False):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__") == TESTS


RemoteObject.__exit__ = _exit  # type: ignore[attr-defined]


def awaitable(peer: Asks, number: int) -> Coroutine[Any, Any, Any]:
    """A coroutine of this process that has the other one run its coroutine to the end."""

    async def wait() -> Any:
        return peer.ask("await", number)

    return wait()
