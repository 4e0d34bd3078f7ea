"""The program's side of its tests: runs the source, then does what the tests ask, until they are gone.

Nothing here protects anything: all of it lives in the program's own process. What protects is that the other side believes
data only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import socket
import sys
import types
from typing import Any

from polyturn.sandbox import sources, wire
from polyturn.sandbox.remote import OPERATIONS, CaseOver, Peer

FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    functools.partial,
    type(functools.lru_cache(int)),
)
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    dict,
    set,
    frozenset,
    range,
    slice,
    object,
    type,
    type(None),
)
PLAIN_TYPES = {kind.__name__: kind for kind in _PLAIN}


class CandidateGate:
    """Hands out anything and does anything: it is the program's business."""

    guards = False

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def kind(self, value: object) -> str | None:
        """As what a value is handed out."""
        if isinstance(value, type):
            return "exception" if issubclass(value, BaseException) else "class"
        if isinstance(value, FUNCTIONS):
            return "function"
        if isinstance(value, types.CoroutineType):
            return "awaitable"
        if hasattr(type(value), "__next__") and type(value).__module__ != self._module.__name__:
            return "iterator"
        return "callable" if callable(value) else "object"

    def name_of(self, value: object) -> wire.Tree | None:
        """Plain types, and exceptions of the standard library, are the same on both sides."""
        if isinstance(value, type) and (PLAIN_TYPES.get(value.__name__) is value or wire.is_shared_exception(value)):
            return ["x", value.__module__, value.__qualname__]
        return None

    def by_name(self, module: str, name: str) -> object:
        """A builtin, or a function of the standard library, that the tests pass."""
        found: object = getattr(importlib.import_module(module), name)
        return found

    def lookup(self, name: str) -> tuple[bool, object]:
        """A global of the program. Modules are not handed out: the tests import their own."""
        value = self._module.__dict__.get(name, self)
        return (False, None) if value is self or isinstance(value, types.ModuleType) else (True, value)

    def operate(self, operation: str, target: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> object:
        """Do it."""
        if operation == "call":
            return target(*arguments, **named)
        if operation == "get":
            return getattr(target, *arguments)
        if operation == "set":
            setattr(target, *arguments)
            return None
        if operation == "next":
            return next_of(target)
        if operation == "await":
            return importlib.import_module("asyncio").run(target)  # not at the top: it is big, and few programs need it
        return OPERATIONS[arguments[0]](target, *arguments[1:])

    def explain(self, error: BaseException) -> str:
        """The traceback, for whoever reads the verdict."""
        return sources.explain(error)


def next_of(iterator: Any) -> tuple[bool, object]:
    """Whether there is a next item, and which."""
    for item in iterator:
        return True, item
    return False, None


def serve(payload: dict[str, Any], payload_socket: socket.socket, channel: socket.socket | None) -> None:
    """Run the source, say whether it came to its end, and answer the tests."""
    assert channel is not None, "the driver gives every tested program a channel"
    channel.setblocking(True)
    failure: str | None = None
    module = types.ModuleType(payload["module"])
    try:
        module = sources.run(payload["source"], payload["module"])
    except BaseException as error:
        failure = sources.explain(error)
    peer = Peer(channel, CandidateGate(module))
    try:
        if failure is not None:
            peer.say("failed", failure[-4000:])
            os._exit(1)
        peer.say("loaded")
        peer.serve_for_ever()
    except CaseOver:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(0)
