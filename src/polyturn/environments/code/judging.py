"""Verdicts on programs, remembered: siblings often write the same program, and equal programs pass equal tests."""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from typing import TypeAlias

from polyturn.sandbox.base import Limits, Program, RunResult, Sandbox, Tests, TestsResult

_Key: TypeAlias = "tuple[str, Tests]"
_REPEATABLE = frozenset(("passed", "failed", "error"))


class Judge:
    """Asks a sandbox, which somebody else starts and stops, and keeps the last `remember` verdicts.

    A verdict with a limit in it is asked for again each time: time and memory depend on what else the machine does.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits | None, remember: int) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._remember = remember
        self._known: OrderedDict[_Key, TestsResult] = OrderedDict()
        self._asking: weakref.WeakValueDictionary[_Key, asyncio.Lock] = weakref.WeakValueDictionary()

    async def run(self, source: str, stdin: str = "") -> RunResult:
        """A program on its own. Raises SandboxError when the sandbox broke."""
        return await self._sandbox.run(Program(source=source, stdin=stdin), self._limits)

    async def verdict(self, source: str, tests: Tests) -> TestsResult:
        """A program's verdict. Raises SandboxError when the sandbox broke."""
        key = (source, tests)
        if not self._remember:
            return await self._ask(source, tests)
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:  # a sibling may be asking the same just now
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            found = await self._ask(source, tests)
            if all(outcome.status in _REPEATABLE for outcome in found.outcomes):
                self._known[key] = found
                if len(self._known) > self._remember:
                    self._known.popitem(last=False)
            return found

    async def _ask(self, source: str, tests: Tests) -> TestsResult:
        return await self._sandbox.run_tests(Program(source=source), tests, self._limits)
