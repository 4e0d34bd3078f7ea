"""The default sandbox: programs run on this machine, each in a process of its own forked from a warm one."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Literal, TypeAlias

from polyturn.errors import IsolationError, SandboxError
from polyturn.sandbox import lines, results, verdicts
from polyturn.sandbox.base import Limits, Line, Program, RunResult, Tests, TestsResult
from polyturn.sandbox.pool import Pool

Mode: TypeAlias = Literal["auto", "namespaces", "filters"]
_log = logging.getLogger(__name__)


class LocalSandbox:
    """Runs programs apart from the machine they run on. Use it in one event loop.

    `limits` hold for every program that brings none. `concurrency` programs run at once, one a core unless it is said.
    `import_paths` are folders that programs may read and import from, besides the standard library. `isolation` says how:
    `namespaces`, `filters` (seccomp and Landlock alone; a program can't start processes), or whichever is better here.
    `unsafe` runs programs even where a line that is needed does not hold.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        concurrency: int | None = None,
        import_paths: tuple[str, ...] = (),
        isolation: Mode = "auto",
        unsafe: bool = False,
    ) -> None:
        self._limits = limits or Limits()
        self._concurrency = concurrency or os.cpu_count() or 1
        self._unsafe = unsafe
        self._mode = isolation
        self._pool = Pool(mode=isolation, import_paths=import_paths)
        self._turns: asyncio.Semaphore | None = None
        self._starting: asyncio.Lock | None = None
        self._isolation: tuple[Line, ...] = ()

    @property
    def isolation(self) -> tuple[Line, ...]:
        """What holds, as found out by a program that tried; known once started."""
        return self._isolation

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, which every program descends from."""
        return self._pool.pid

    async def start(self) -> None:
        """Start the pool and try out what holds. Raises IsolationError or SandboxError."""
        self._turns = asyncio.Semaphore(self._concurrency)
        self._starting = asyncio.Lock()
        await self._pool.start()
        try:
            found = await results.run_program(self._pool, Program(source=lines.PROBE), lines.PROBE_LIMITS)
            self._isolation = lines.judge(self._pool.means, found)
            lines.insist(self._isolation, unsafe=self._unsafe)
            if self._mode == "namespaces" and not self._pool.means.namespaces and not self._unsafe:
                why = self._pool.means.why_not.get("namespaces", "")
                raise IsolationError(f"isolation=namespaces was asked for and can't be had: {why}; use isolation=auto")
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every program and the pool."""
        self._turns = self._starting = None
        await self._pool.stop()

    async def run(self, program: Program, limits: Limits | None = None) -> RunResult:
        """Run a program to its end or its limit. Raises SandboxError when the sandbox broke, not when the program did."""
        async with self._turn():
            await self._be_alive()
            return await results.run_program(self._pool, program, limits or self._limits)

    async def run_tests(self, program: Program, tests: Tests, limits: Limits | None = None) -> TestsResult:
        """Judge a program by tests. Raises SandboxError when the sandbox broke."""
        async with self._turn():
            await self._be_alive()
            return await verdicts.judge(self._pool, program, tests, limits or self._limits)

    def _turn(self) -> asyncio.Semaphore:
        if self._turns is None:
            raise SandboxError("the sandbox is not started; call start() first")
        return self._turns

    async def _be_alive(self) -> None:
        """Start the supervisor again if it is gone. Whoever was running a program in it got a SandboxError."""
        if self._starting is None:
            raise SandboxError("the sandbox was stopped while a program waited for its turn")
        async with self._starting:
            if self._starting is not None and not self._pool.alive:
                _log.warning("the sandbox's supervisor is gone; starting another")
                await self._pool.stop()
                await self._pool.start()
