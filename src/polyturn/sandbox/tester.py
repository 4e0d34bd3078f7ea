"""The tests' side: runs the cases in a process that the program has no way into, and says how each went.

The program is reached through `remote` only; what comes back is data, or a proxy that answers by the rules of `proxies`. The
verdict goes to the driver over a socket that the program never had, and carries a number that only driver and tests know.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import linecache
import os
import socket
import sys
import time
import traceback
import types
from typing import Any

from polyturn.sandbox import frames, wire
from polyturn.sandbox.candidate import FUNCTIONS, PLAIN_TYPES, next_of
from polyturn.sandbox.proxies import TESTS, Remote
from polyturn.sandbox.remote import OPERATIONS, CaseOver, Peer

_SHARED_MODULES = ("builtins", "math", "operator")
_MODULES_WITH_ITERATORS = ("builtins", "itertools")
_MOST_DETAIL = 4000


class TesterGate:
    """Lets the program do little: call what it was given, take items of an iterator, use public parts of the tests' objects."""

    guards = True

    def kind(self, value: object) -> str | None:
        """Functions, iterators, and classes and objects that the tests define; nothing else leaves."""
        if isinstance(value, type):
            return "class" if value.__module__ == TESTS and not issubclass(value, BaseException) else None
        if isinstance(value, FUNCTIONS):
            return "function"
        if hasattr(type(value), "__next__") and type(value).__module__ in _MODULES_WITH_ITERATORS:
            return "iterator"
        if type(value).__module__ == TESTS:
            return "callable" if callable(value) else "object"
        return None

    def name_of(self, value: object) -> wire.Tree | None:
        """Builtins and simple functions of the standard library are the same on both sides."""
        if isinstance(value, type) and wire.is_shared_exception(value):
            return ["x", value.__module__, value.__qualname__]
        module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
        if module in _SHARED_MODULES and isinstance(name, str) and getattr(sys.modules[module], name, None) is value:
            return ["x", module, name]
        return None

    def by_name(self, module: str, name: str) -> object:
        """Plain types and builtin exceptions: what the program gives is not to be code."""
        if module == "builtins" and name in PLAIN_TYPES:
            return PLAIN_TYPES[name]
        exception = wire.shared_exception(module, name)
        if exception is None:
            raise wire.WireError(f"{name!r} is no plain type")
        return exception

    def lookup(self, name: str) -> tuple[bool, object]:
        """The program has no names to ask for."""
        raise wire.WireError("the tests hand out nothing by name")

    def operate(self, operation: str, target: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> object:
        """Do it, if it is one of the few things allowed."""
        kind = self.kind(target)
        if operation == "call" and kind in ("function", "class", "callable"):
            return target(*arguments, **named)
        if operation == "next" and kind == "iterator":
            return next_of(target)
        if kind in ("object", "callable") and operation in ("get", "set", "op"):
            if operation == "op":
                return OPERATIONS[arguments[0]](target, *arguments[1:])
            if str(arguments[0]).startswith("_"):
                raise AttributeError(f"{arguments[0]} is out of the program's reach")
            if operation == "get":
                return getattr(target, *arguments)
            setattr(target, *arguments)
            return None
        if operation == "get" and arguments in (("__name__",), ("__qualname__",)) and kind is not None:
            return getattr(target, *arguments)
        raise TypeError(f"a program may not {operation} a {type(target).__name__} of its tests")

    def explain(self, error: BaseException) -> str:
        """Nothing: the lines of a test are none of the program's business."""
        return ""


class Namespace(dict[str, Any]):
    """The tests' globals. A name that they use and don't bind comes from the program, each time if it is data.

    Unless an entry point is called so, a module of the standard library is that module, imported here: tests that forgot to
    import `math` must not get the program's `math.isclose`.
    """

    def __init__(self, peer: Peer, sources: list[str], entry_points: list[str] | None) -> None:
        super().__init__(__name__=TESTS, __builtins__=builtins, eval=_no_evaluation, exec=_no_evaluation)
        self._peer = peer
        used, modules = names_to_take(sources)
        self._entry_points = frozenset(entry_points) if entry_points is not None else used - modules
        self._own_modules = modules - self._entry_points

    def fetch_all(self) -> None:
        """Look all names up once, so that the program's classes among them are known before the first case."""
        for name in sorted(self._entry_points):
            with contextlib.suppress(LookupError):
                self[name]

    def __missing__(self, name: str) -> Any:
        if name in self._own_modules:
            value: Any = importlib.import_module(name)
        elif name in self._entry_points:
            try:
                value = self._peer.fetch(name)
            except LookupError:
                raise KeyError(name) from None
        else:
            raise KeyError(name)
        if isinstance(value, Remote | type | types.ModuleType):
            self[name] = value
        return value


def serve(payload: dict[str, Any], verdicts: socket.socket, channel: socket.socket | None) -> None:
    """Run the cases from `start` on and say how each went; stops early when the program is gone."""
    assert channel is not None, "the driver gives every tests process a channel"
    channel.setblocking(True)
    verdicts.setblocking(True)
    nonce = payload["nonce"]

    def say(**words: Any) -> None:
        verdicts.sendall(frames.pack(json.dumps({"nonce": nonce, **words}).encode()))

    classes = payload["classes"]
    peer = Peer(channel, TesterGate(), None if classes is None else tuple(classes))
    cases, setup = payload["cases"], payload["setup"]
    try:
        greeting = peer.hear()
    except (CaseOver, wire.WireError):
        greeting = ["gone"]
    if greeting[0] != "loaded":
        say(end="not loaded" if greeting[0] == "failed" else "left at start", detail=str(greeting[-1])[-_MOST_DETAIL:])
        os._exit(0)
    namespace = Namespace(peer, [setup, *cases], payload["entry_points"])
    _offer_module(payload["module"], peer)
    try:
        namespace.fetch_all()
        _execute(setup, "<setup>", namespace)
    except BaseException as error:
        say(end="gone" if isinstance(error, CaseOver) else "setup", detail=_detail(error))
        os._exit(0)
    for number in range(payload["start"], len(cases)):
        status, detail = run_case(peer, cases[number], f"<case {number + 1}>", namespace, payload["case_s"])
        say(case=number, status=status, detail=detail[-_MOST_DETAIL:])
        if status == "gone":
            os._exit(0)
    say(end="done")


def run_case(peer: Peer, source: str, name: str, namespace: Namespace, case_s: float | None) -> tuple[str, str]:
    """One case: `passed`, `failed`, `error` or `gone`, and why."""
    ends = None if case_s is None else time.monotonic() + case_s
    try:
        peer.begin_case()
        peer.wait_until(ends)
        _execute(source, name, namespace)
    except CaseOver:
        pass  # `peer.over` says it
    except AssertionError as error:
        if peer.over is None and peer.failed is None:
            return ("error" if getattr(error, "of_program", False) else "failed"), _detail(error)
    except BaseException as error:
        if peer.over is None and peer.failed is None:
            return "error", _detail(error)
    if peer.over is not None:
        return ("gone" if peer.over.gone else "error"), peer.over.reason
    if peer.failed is not None:
        return "failed", _detail(peer.failed)
    return "passed", ""


def names_to_take(sources: list[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The names that code uses, doesn't bind and that are not builtin; and which of them it uses as modules (`math.pi`).

    What is no Python has no names: it will fail by itself.
    """
    nodes: list[ast.AST] = []
    for source in sources:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            nodes += ast.walk(ast.parse(source))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    dotted = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    names = used - bound - set(dir(builtins))
    return frozenset(names), frozenset(names & dotted & sys.stdlib_module_names)


def _execute(source: str, name: str, namespace: Namespace) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec", dont_inherit=True), namespace)


def _offer_module(name: str, peer: Peer) -> None:
    """Let tests import the program as a module, name by name: with `*` it would choose the names itself, `abs` for one."""
    module = types.ModuleType(name)

    def lookup(wanted: str) -> Any:
        try:
            if wanted.startswith("__"):
                raise LookupError(wanted)
            return peer.fetch(wanted)
        except LookupError:
            raise AttributeError(f"the program has no {wanted}") from None

    module.__getattr__ = lookup  # type: ignore[method-assign]
    sys.modules[name] = module


def _no_evaluation(*arguments: object) -> None:
    raise RuntimeError("tests must not evaluate text, which may be the program's; compare values, or use ast.literal_eval")


def _detail(error: BaseException) -> str:
    """The exception in a few lines: where in the tests, and the program's own traceback if it came from there."""
    frames_of_tests = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == "<setup>" or frame.filename.startswith("<case ")
    ]
    where = f"{frames_of_tests[-1].line}\n" if frames_of_tests else ""
    told = getattr(error, "told", "")
    if told:
        return f"{where}{told}".rstrip()
    try:
        return where + "".join(traceback.format_exception_only(type(error), error)).rstrip()
    except BaseException:
        return f"{where}{type(error).__name__}"
