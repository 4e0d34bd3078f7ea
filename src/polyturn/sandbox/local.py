"""The default sandbox: programs run on this machine, each in a process of its own forked from a warm one."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import socket
from typing import Literal, TypeAlias

from polyturn.errors import DataError, SandboxError
from polyturn.sandbox import frames, lines
from polyturn.sandbox.base import ExitReason, Limits, Line, Program, RunResult, Tests, TestsResult
from polyturn.sandbox.pool import Pool, Report

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
            found = await self._pool_run(Program(source=lines.PROBE), lines.PROBE_LIMITS)
            self._isolation = lines.judge(self._pool.means, found)
            lines.insist(self._isolation, unsafe=self._unsafe)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every program and the pool."""
        await self._pool.stop()

    async def run(self, program: Program, limits: Limits | None = None) -> RunResult:
        """Run a program to its end or its limit. Raises SandboxError when the sandbox broke, not when the program did."""
        async with self._turn():
            await self._be_alive()
            return await self._pool_run(program, limits or self._limits)

    async def run_tests(self, program: Program, tests: Tests, limits: Limits | None = None) -> TestsResult:
        """Judge a program by tests. Raises SandboxError when the sandbox broke."""
        raise NotImplementedError

    def _turn(self) -> asyncio.Semaphore:
        if self._turns is None:
            raise SandboxError("the sandbox is not started; call start() first")
        return self._turns

    async def _be_alive(self) -> None:
        """Start the supervisor again if it is gone. Whoever was running a program in it got a SandboxError."""
        assert self._starting is not None, "checked by _turn"
        async with self._starting:
            if not self._pool.alive:
                _log.warning("the sandbox's supervisor is gone; starting another")
                await self._pool.stop()
                await self._pool.start()

    async def _pool_run(self, program: Program, limits: Limits) -> RunResult:
        report = await self._send_and_run("program", program_payload(program, limits), limits)
        return result_of(report, limits)

    async def _send_and_run(self, role: str, payload: bytes, limits: Limits) -> Report:
        here, there = socket.socketpair()
        here.setblocking(False)
        with here:
            job = asyncio.ensure_future(self._pool.run(role, limits, [there]))
            try:
                await send(here, payload)
                return await job
            finally:
                job.cancel()


async def send(stream: socket.socket, payload: bytes) -> None:
    """Send a payload; a process that left without reading it is its monitor's to report."""
    try:
        await asyncio.get_running_loop().sock_sendall(stream, frames.pack(payload))
    except ConnectionError:
        return


def program_payload(program: Program, limits: Limits) -> bytes:
    """What a program's process reads. Raises DataError when its files are more than its folder may hold."""
    size = sum(map(len, program.files.values()))
    if size > limits.file_bytes or len(program.files) > limits.num_files:
        raise DataError(
            f"{len(program.files)} files of {size} bytes are more than the program's folder may hold "
            f"(file_bytes={limits.file_bytes}, num_files={limits.num_files}); raise the limits or bring less"
        )
    files = {name: base64.b64encode(data).decode() for name, data in program.files.items()}
    return json.dumps({"source": program.source, "stdin": program.stdin, "files": files}).encode()


def result_of(report: Report, limits: Limits) -> RunResult:
    """A monitor's report as the contract has it."""
    ended = report.why == "ended"
    code = os.WEXITSTATUS(report.status) if ended and os.WIFEXITED(report.status) else None
    number = os.WTERMSIG(report.status) if ended and os.WIFSIGNALED(report.status) else None
    stderr = report.stderr.decode(errors="replace")
    return RunResult(
        reason=_reason(report, code, number, stderr, limits),
        exit_code=code,
        signal=number,
        stdout=report.stdout.decode(errors="replace"),
        stderr=stderr,
        seconds=report.seconds,
        cpu_s=report.cpu_s,
    )


def _reason(report: Report, code: int | None, number: int | None, stderr: str, limits: Limits) -> ExitReason:
    reasons: dict[str, ExitReason] = {"timeout": "timeout", "memory": "memory", "output": "output", "files": "files"}
    if report.why in reasons:
        return reasons[report.why]
    if number is not None:
        return "timeout" if report.cpu_s >= limits.cpu_s else "killed"
    if code == 0:
        return "ok"
    last = stderr.rstrip().rpartition("\n")[2]
    return "memory" if code == 1 and last.startswith("MemoryError") else "error"
