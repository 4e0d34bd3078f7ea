"""A program as its process reads it, and its monitor's report as the contract has it."""

from __future__ import annotations

import base64
import json
import os
import signal
from pathlib import PurePosixPath

from polyturn.errors import DataError
from polyturn.sandbox.base import ExitReason, Limits, Program, RunResult
from polyturn.sandbox.pool import Pool, Report

_BLOCK_BYTES = 4096


def program_payload(program: Program, limits: Limits, *, module: str = "__main__") -> bytes:
    """What a program's process reads. Raises DataError when its files are more than its folder may hold."""
    size = sum(-(-len(data) // _BLOCK_BYTES) * _BLOCK_BYTES for data in program.files.values())
    number = len({place for name in program.files for place in (PurePosixPath(name), *PurePosixPath(name).parents)})
    if size > limits.file_bytes or number > limits.num_files:
        raise DataError(
            f"{number} files and folders of {size} bytes are more than the program's folder may hold "
            f"(file_bytes={limits.file_bytes}, num_files={limits.num_files}); raise the limits or bring less"
        )
    files = {name: base64.b64encode(data).decode() for name, data in program.files.items()}
    return json.dumps({"source": program.source, "stdin": program.stdin, "files": files, "module": module}).encode()


async def run_program(pool: Pool, program: Program, limits: Limits) -> RunResult:
    """Run a whole program in a pool. Raises SandboxError when the pool broke."""
    return result_of(await pool.run_with("program", program_payload(program, limits), limits), limits)


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
        used_up = number == signal.SIGXCPU or (number == signal.SIGKILL and report.cpu_s >= limits.cpu_s)
        return "timeout" if used_up else "killed"
    if code == 0:
        return "ok"
    last = stderr.rstrip().rpartition("\n")[2]
    return "memory" if code == 1 and last.startswith("MemoryError") else "error"
