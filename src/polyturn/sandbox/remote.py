"""Two processes that call each other's functions over a socket: the tests' side, which trusts nothing, and the program's.

    request   ["?", operation, target, arguments]     target: a handle of the receiver, or a name
    answer    ["=", changes, value]                   changes: [number, content] of argument containers that are not as before
              ["!", changes, classes, arguments, text]          it raised; each class is [number, module, name]
              ["#", sentence]                         it can't be said in data

While one side waits for an answer it serves requests of the other, which is how a function of the tests is called back.
"""

from __future__ import annotations

import builtins
import operator
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from polyturn.sandbox import frames, proxies, wire
from polyturn.sandbox.proxies import (
    ANYTHING,
    GUARDED,
    NOTHING,
    Remote,
    RemoteClass,
    RemoteFunction,
    RemoteIterator,
    RemoteObject,
)
from polyturn.sandbox.wire import Scope, Tree, WireError

MOST_CALLS_DEEP = 40

_KINDS: dict[str, type[Remote]] = {
    "function": RemoteFunction,
    "class": RemoteClass,
    "iterator": RemoteIterator,
    "object": RemoteObject,
}


class CaseOver(BaseException):
    """A test case can't be judged any more, whatever the tests catch. `gone` when nor can any other."""

    def __init__(self, reason: str, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.gone = gone


class Gate(Protocol):
    """What one side lets the other do."""

    guards: bool

    def kind(self, value: object) -> str | None:
        """As what a value may be handed out: function, callable, class, exception, iterator, awaitable, object; None: not."""

    def name_of(self, value: object) -> Tree | None:
        """The ["x", module, name] of a value that the other side has too."""

    def by_name(self, module: str, name: str) -> object:
        """The value of such a tree. Raises WireError when it is none."""

    def lookup(self, name: str) -> tuple[bool, object]:
        """Whether there is something of that name, and what."""

    def operate(self, operation: str, target: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> object:
        """Do what is asked with one of this side's objects."""

    def explain(self, error: BaseException) -> str:
        """What the other side is told of an exception, besides its type and arguments."""


class Peer:
    """One end of the channel. `classes` are those that the tests declare, None where they don't say."""

    def __init__(self, channel: socket.socket, gate: Gate, classes: tuple[str, ...] | None = None) -> None:
        self._channel = channel
        self._gate = gate
        self._classes = classes
        self.guards = gate.guards
        self._owned: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._theirs: dict[int, object] = {}
        self._stubs: dict[int, type[BaseException]] = {}
        self._levels: dict[int, int] = {}
        self._depth = 0
        self._ends: float | None = None
        self.over: CaseOver | None = None
        """Set once this side has given up, so that code which swallows the exception changes nothing."""
        self.failed: AssertionError | None = None
        """An assertion of the tests that did not hold while the program called them back: it may swallow it, this doesn't."""

    def ask(
        self, operation: str, target: int | str, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Have the other side do something. Raises what it raised there, CaseOver when it can't be judged any more."""
        if self.over is not None:
            raise self.over
        scope = Scope()
        try:
            tree = wire.encode((arguments, named or {}), scope, self)
            self._send(["?", operation, target, tree])
        except WireError as error:
            raise TypeError(f"this can't be handed to the program: {error}") from None
        try:
            while True:
                answer = self._receive()
                if answer[0] != "?":
                    return self._take(answer, scope)
                self._serve(answer)
        except (StopIteration, StopAsyncIteration) as error:
            if not self.guards or arguments[:1] == ("next",):
                raise
            raise _as_other(error) from None  # it would end a `map` or `zip` of the tests early
        except Exception as error:
            if getattr(error, "of_program", False) or not self.guards:
                raise
            raise self._give_up(f"the program broke the protocol of the tests: {error}", gone=True) from None

    def fetch(self, name: str) -> Any:
        """What the program has under a name that the tests use. A class that comes by name is one they mean.

        Raises LookupError when it has none.
        """
        found, value = self.ask("name", name)
        if found is not True:
            raise LookupError(name)
        if isinstance(value, RemoteClass):
            self._levels[value._number] = self._level_of(name)
            value.mean_it(self._level_of(name))
        return value

    def _level_of(self, name: str) -> int:
        """What the tests make of a class that they take by `name`: a function's name that turns out to be a class is none."""
        if self._classes is not None:
            return ANYTHING if name in self._classes else NOTHING
        return GUARDED if name.lstrip("_")[:1].isupper() else NOTHING

    def serve_for_ever(self) -> None:
        """Do what the other side asks until it is gone."""
        while True:
            message = self._receive()
            self._serve(message)

    def begin_case(self) -> None:
        """Forget that a case was given up. Raises CaseOver when the program is gone for good."""
        if self.over is not None and self.over.gone:
            raise self.over
        self.over = self.failed = None

    def say(self, *message: Tree) -> None:
        """Send a message that is neither request nor answer."""
        self._send(list(message))

    def hear(self) -> list[Tree]:
        """The next message. Raises CaseOver when the other side is gone."""
        return self._receive()

    def wait_until(self, ends: float | None) -> None:
        """The time.monotonic() until which to wait for messages from now on; None waits without end."""
        self._ends = ends

    # ---- handles

    def export(self, value: object) -> Tree:
        """A handle for a value of this side, or what it is on the other. Raises WireError when it may not leave."""
        if isinstance(value, Remote):
            return ["y", value._number]
        tree = self._gate.name_of(value)
        if tree is not None:
            return tree
        kind = self._gate.kind(value)
        if kind is None:
            raise WireError(f"a {type(value).__name__} is no data, and can't be handed over")
        described = value if isinstance(value, type) else type(value)
        parent = _builtin_exception(described) if kind == "exception" else None
        number_of_class = self._number(type(value)) if kind in ("object", "callable") else -1
        return ["h", self._number(value), kind, described.__name__, number_of_class, parent]

    def resolve(self, tree: list[Tree]) -> object:
        """What a handle stands for here."""
        if tree[0] == "y":
            return self._owned[_natural(tree[1])]
        if tree[0] == "x":
            return self._gate.by_name(tree[1], tree[2])
        _, number, kind, name, number_of_class, parent = tree
        known = self._theirs.get(_natural(number))
        if known is None:
            known = self._new_proxy(number, kind, str(name)[:100], number_of_class, parent)
            if kind != "awaitable":
                self._theirs[number] = known
        return known

    def _new_proxy(self, number: int, kind: str, name: str, number_of_class: int, parent: str | None) -> object:
        if kind == "awaitable":
            return proxies.awaitable(self, number)
        if kind == "exception":
            self._stubs[number] = _stub(name, wire.shared_exception("builtins", parent) or Exception)
            return self._stubs[number]
        level = self._levels.get(number_of_class, NOTHING)
        if kind == "callable":
            kind = "object" if level else "function"
        return _KINDS[kind](self, number, name, level)

    def _number(self, value: object) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._owned)
            self._owned.append(value)  # which also keeps its id from meaning another
        return number

    # ---- messages

    def _serve(self, message: list[Tree]) -> None:
        """Do what one request asks, and answer."""
        self._depth += 1
        try:
            data = wire.dumps(self._answer(message))
        except Exception as error:  # whatever can't be said: nothing of it was sent, and the numbers of its scope die with it
            data = wire.dumps(
                ["#", str(error)[:1000] if isinstance(error, WireError) else f"{type(error).__name__}: {error}"[:1000]]
            )
        finally:
            self._depth -= 1
        self._send_bytes(data)

    def _answer(self, message: list[Tree]) -> Tree:
        scope = Scope()
        _, operation, target, tree = message
        arguments, named = wire.decode(tree, scope, self)
        before = [(container, _look(container)) for container in scope.containers]
        try:
            if self._depth > MOST_CALLS_DEEP:
                raise RecursionError(f"calls between tests and program nest deeper than {MOST_CALLS_DEEP}")
            value = self._perform(operation, target, arguments, named)
        except (CaseOver, WireError):
            raise
        except AssertionError as error:
            if self.guards and not getattr(error, "of_program", False):
                self.failed = error
                error = AssertionError()  # what it says may be what the tests expect
            return self._describe(error, before, scope)
        except BaseException as error:
            return self._describe(error, before, scope)
        return ["=", self._changes(before, scope), wire.encode(value, scope, self)]

    def _perform(self, operation: str, target: Tree, arguments: tuple[Any, ...], named: dict[str, Any]) -> object:
        if operation == "name":
            return self._gate.lookup(str(target))
        return self._gate.operate(operation, self._owned[_natural(target)], arguments, named)

    def _changes(self, before: list[tuple[Any, list[Any]]], scope: Scope) -> list[Tree]:
        changed = [number for number, (container, look) in enumerate(before) if not _same(look, _look(container))]
        return [[number, wire.encode_content(before[number][0], scope, self)] for number in changed]

    def _describe(self, error: BaseException, before: list[tuple[Any, list[Any]]], scope: Scope) -> Tree:
        kinds = [kind for kind in type(error).__mro__ if issubclass(kind, BaseException)]
        classes = [[self._number(kind), kind.__module__, kind.__qualname__] for kind in kinds]
        changes = self._changes(before, scope)
        try:
            arguments = wire.encode(error.args, scope, self)
        except WireError:
            arguments = ["t", str(error)]
        return ["!", changes, classes, arguments, self._gate.explain(error)[-4000:]]

    def _take(self, answer: list[Tree], scope: Scope) -> Any:
        """The value of an answer; raises what it says was raised."""
        if answer[0] == "#" and not self.guards:
            raise TypeError(f"the tests can't take or give this: {answer[1]}")
        if answer[0] == "#":
            raise self._give_up(f"what the program gave back can't be judged: {str(answer[1])[:500]}")
        for number, content in answer[1]:
            wire.refill(scope.containers[_natural(number)], content, scope, self)
        if answer[0] == "=":
            return wire.decode(answer[2], scope, self)
        _, _, classes, tree, text = answer
        arguments = wire.decode(tree, scope, self)
        error = wire.make_exception(self._exception_of(classes), arguments if isinstance(arguments, tuple) else (arguments,))
        error.of_program = True  # type: ignore[attr-defined]
        error.told = str(text)  # type: ignore[attr-defined]
        raise error

    def _exception_of(self, classes: list[list[Tree]]) -> type[BaseException]:
        """The nearest class known here, one that the tests name or of the standard library; else a subclass of it by name."""
        own_name = ""
        for number, module, name in classes:
            known = self._stubs.get(_natural(number)) or wire.shared_exception(module, name)
            if known is not None:
                return known if not own_name else _stub(own_name, known)
            own_name = own_name or str(name)
        return Exception

    def _give_up(self, reason: str, *, gone: bool = False) -> CaseOver:
        self.over = CaseOver(reason, gone=gone)
        return self.over

    def _send(self, message: list[Tree]) -> None:
        self._send_bytes(wire.dumps(message))

    def _send_bytes(self, data: bytes) -> None:
        try:
            self._channel.sendall(frames.pack(data))
        except TimeoutError:
            raise self._give_up("timeout", gone=True) from None
        except OSError:
            raise self._give_up("the program has ended", gone=True) from None

    def _receive(self) -> list[Tree]:
        try:
            if self._ends is not None:
                self._channel.settimeout(max(0.001, self._ends - time.monotonic()))
            data = frames.receive(self._channel, wire.MOST_BYTES)
        except TimeoutError:
            raise self._give_up("timeout", gone=True) from None
        except frames.FrameError as error:
            raise self._give_up(f"the program sent {error}", gone=True) from None
        if data is None:
            raise self._give_up("the program has ended", gone=True)
        message = wire.loads(data)
        if not isinstance(message, list) or not message:
            raise WireError("a message is a list")
        return message


def _as_other(error: Exception) -> RuntimeError:
    """What Python makes of a StopIteration where it must not end anything."""
    other = RuntimeError(f"the program raised {type(error).__name__}")
    other.__dict__.update(error.__dict__)
    return other


def _stub(name: str, base: type[BaseException]) -> type[BaseException]:
    """A class of this side that stands for an exception class of the program."""
    return type(name[:100], (base,), {"__module__": "program"})


def _builtin_exception(kind: type) -> str | None:
    return next((base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base), None)


def _natural(number: Tree) -> int:
    if type(number) is not int or number < 0:
        raise WireError(f"{number!r} is no number of anything")
    return number


def _look(container: Any) -> list[Any]:
    """What a container holds now, to be compared by identity later."""
    if isinstance(container, dict):
        return [part for pair in dict.items(container) for part in pair]
    return list(container)


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))


_BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift lt le gt ge eq contains getitem".split()


def _reflected(operation: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    return lambda value, other: operation(other, value)


OPERATIONS: dict[str, Callable[..., object]] = {
    **{name.rstrip("_"): getattr(operator, name) for name in _BINARY},
    **{f"r{name.rstrip('_')}": _reflected(getattr(operator, name)) for name in _BINARY[:13]},
    **{name: getattr(operator, name) for name in ("neg", "pos", "invert", "index", "setitem", "delitem")},
    **{kind.__name__: kind for kind in (abs, float, int, complex, round, bool, len, str, repr, reversed, hash)},
    "iter": lambda value: (item for item in value),
    "next": next,
    "trunc": lambda value: value.__trunc__(),
    "floor": lambda value: value.__floor__(),
    "ceil": lambda value: value.__ceil__(),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, failed: bool(
        type(value).__exit__(value, *([Exception, Exception(), None] if failed else [None] * 3))
    ),
    "hasinstance": lambda kind, value: isinstance(value, kind),
    "hassubclass": lambda kind, value: issubclass(value, kind),
}
