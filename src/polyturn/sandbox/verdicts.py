"""The driver's side of a verdict: starts the program and its tests side by side, listens to the tests alone.

When the program ends in the middle of a case, that case is judged by how it ended, and the rest goes on with a fresh pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from dataclasses import dataclass, field, replace
from typing import Any

from polyturn.sandbox import async_frames, frames, results
from polyturn.sandbox.base import MIB, CaseOutcome, CaseStatus, Limits, OutputCase, Program, Tests, TestsResult
from polyturn.sandbox.pool import Pool, Report

_TESTS_EXTRA_S = 5.0
"""The tests may take this much longer than the program, so that the program's limit is the one that is hit."""
_GRACE_S = 0.25
"""For a program to end by itself once its tests have, so that what it wrote last is not lost."""
_MOST_VERDICT = 1 << 20
_STATUSES: dict[str, CaseStatus] = {"passed": "passed", "failed": "failed", "error": "error"}


@dataclass(slots=True)
class _Verdict:
    """What one pair of processes gave."""

    outcomes: list[CaseOutcome] = field(default_factory=list)
    end: str | None = None
    """done, gone, not loaded, left at start, setup; None when the tests themselves were ended."""
    detail: str = ""
    stdout: str = ""
    stderr: str = ""


async def judge(pool: Pool, program: Program, tests: Tests, limits: Limits) -> TestsResult:
    """Run all cases, in order. Raises SandboxError when the sandbox broke."""
    began = time.monotonic()
    outcomes: list[CaseOutcome] = []
    stdout, stderr, loaded = [], [], True
    while len(outcomes) < tests.total:
        left = limits.wall_s - (time.monotonic() - began) if outcomes else limits.wall_s
        if left <= 0:
            outcomes += [CaseOutcome(status="not_run", detail="the time of all cases was used up")] * (
                tests.total - len(outcomes)
            )
            break
        now = replace(limits, wall_s=left)
        case = tests.cases[len(outcomes)]
        if isinstance(case, OutputCase):
            verdict = await _compare_output(pool, program, case, tests, now)
        else:
            verdict = await _run_pair(pool, program, tests, len(outcomes), now)
        outcomes += verdict.outcomes
        loaded &= verdict.end not in ("not loaded", "left at start")
        stdout.append(verdict.stdout)
        stderr.append(verdict.stderr)
    return TestsResult(
        outcomes=tuple(outcomes),
        stdout="".join(stdout)[: limits.output_bytes],
        stderr="".join(stderr)[: limits.output_bytes],
        seconds=time.monotonic() - began,
        loaded=loaded,
    )


async def _compare_output(pool: Pool, program: Program, case: OutputCase, tests: Tests, limits: Limits) -> _Verdict:
    """Run the whole program on the case's input. The expected output never leaves this process."""
    if tests.case_s is not None:
        limits = replace(limits, wall_s=min(limits.wall_s, tests.case_s))
    fed = replace(program, stdin=case.stdin)
    result = await results.run_program(pool, fed, limits)
    if not result.ok:
        status: CaseStatus = "error" if result.reason == "ok" else result.reason
        outcome = CaseOutcome(status=status, detail=result.stderr[-4000:] or f"the program ended by {result.reason}")
    elif _blanks_aside(result.stdout) == _blanks_aside(case.stdout):
        outcome = CaseOutcome(status="passed")
    else:
        outcome = CaseOutcome(status="failed", detail="the output differs from the expected one")
    return _Verdict(outcomes=[outcome], stdout=result.stdout, stderr=result.stderr)


def _blanks_aside(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def _run_pair(pool: Pool, program: Program, tests: Tests, start: int, limits: Limits) -> _Verdict:
    """One pair of processes, from case `start` to the end of a run of code cases. At least one outcome comes of it."""
    cases = []
    for case in tests.cases[start:]:
        if isinstance(case, OutputCase):
            break
        cases.append(case)
    order = {
        "setup": tests.setup,
        "cases": cases,
        "start": 0,
        "entry_points": tests.entry_points,
        "classes": tests.classes,
        "module": tests.module,
        "case_s": tests.case_s,
        "nonce": secrets.token_hex(16),
    }
    verdict = _Verdict()
    for_program, for_tests = socket.socketpair()
    source = results.program_payload(program, limits, module=tests.module)
    end = asyncio.Event()
    program_job = asyncio.ensure_future(pool.run_with("candidate", source, limits, for_program, end))
    tests_job = asyncio.ensure_future(_run_tests(pool, order, limits, for_tests, verdict))
    try:
        tests_report = await _first_of_pair(tests_job, program_job)
        await asyncio.wait([program_job], timeout=_GRACE_S)
        end.set()
        program_report = await program_job
    finally:
        for job in (program_job, tests_job):
            job.cancel()
        await asyncio.gather(program_job, tests_job, return_exceptions=True)
        for_program.close()
        for_tests.close()
    _conclude(verdict, len(cases), program_report, tests_report, limits)
    return verdict


async def _first_of_pair(tests_job: asyncio.Future[Report], program_job: asyncio.Future[Report]) -> Report:
    """The tests' report; an error of either is raised at once."""
    pending: set[asyncio.Future[Report]] = {tests_job, program_job}
    while not tests_job.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for job in done:
            job.result()
    return tests_job.result()


async def _run_tests(pool: Pool, order: dict[str, Any], limits: Limits, channel: socket.socket, verdict: _Verdict) -> Report:
    """The tests' process, whose verdict is read while it runs."""
    here, there = socket.socketpair()
    here.setblocking(False)
    theirs = Limits(
        wall_s=limits.wall_s + _TESTS_EXTRA_S,
        cpu_s=limits.cpu_s + _TESTS_EXTRA_S,
        memory_bytes=max(limits.memory_bytes, 1024 * MIB),
        output_bytes=MIB,
    )
    with here:
        listening = asyncio.ensure_future(_listen(here, order, verdict))
        try:
            report = await pool.run("tests", theirs, [there, channel])
            await listening
            return report
        finally:
            there.close()
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening


async def _listen(stream: socket.socket, order: dict[str, Any], verdict: _Verdict) -> None:
    """Send the tests, then take their verdict as it comes."""
    await async_frames.send(stream, json.dumps(order).encode())
    while verdict.end is None:
        try:
            data = await async_frames.receive(stream, _MOST_VERDICT)
        except frames.FrameError:
            return
        if data is None:
            return
        words = json.loads(data)
        if words.get("nonce") != order["nonce"]:
            return
        if "end" in words:
            verdict.end, verdict.detail = words["end"], words.get("detail", "")
        elif words["status"] == "gone":
            verdict.end, verdict.detail = "gone", words["detail"]
        else:
            verdict.outcomes.append(CaseOutcome(status=_STATUSES[words["status"]], detail=words["detail"]))


def _conclude(verdict: _Verdict, total: int, program: Report, tests: Report, limits: Limits) -> None:
    """Judge the case in which the pair ended, or all of them where no other pair would get further."""
    result = results.result_of(program, limits)
    verdict.stdout, verdict.stderr = result.stdout, result.stderr
    missing = total - len(verdict.outcomes)
    if verdict.end == "done" or missing == 0:
        return
    if verdict.end == "not loaded":
        outcome = CaseOutcome(status="error", detail=verdict.detail)
    elif verdict.end == "left at start":
        outcome = _how_it_left(result.reason, "before it was loaded")
    elif verdict.end == "setup":
        outcome = CaseOutcome(status="error", detail=f"the setup of the tests failed: {verdict.detail}")
    elif verdict.end == "gone":
        outcome = _how_it_left(result.reason, verdict.detail)
    elif tests.why == "timeout":
        outcome = CaseOutcome(status="timeout", detail="the tests did not come to an end")
    else:
        outcome = CaseOutcome(status="error", detail=f"the tests were ended ({tests.why}, status {tests.status})")
    hopeless = verdict.end in ("not loaded", "left at start", "setup")
    verdict.outcomes += [outcome] * (missing if hopeless else 1)


def _how_it_left(reason: str, detail: str) -> CaseOutcome:
    if detail == "timeout":
        return CaseOutcome(status="timeout", detail="the case took longer than its time")
    if reason in ("timeout", "memory", "output", "files", "killed"):
        return CaseOutcome(status=reason, detail=f"the program was ended: {reason}")  # type: ignore[arg-type]
    return CaseOutcome(status="error", detail=f"{detail}: the program left before its tests did")
