"""Any sandbox as a `programs.CodeRunner`: what rewards, `data check` and environments ask about a program, in their words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyturn.programs import EntryPoints, OutputCase, Verdict
from polyturn.sandbox.base import CaseOutcome, Limits, Program, Sandbox, Tests

_MOST_REASON = 300
LIMIT_WORDS = {
    "timeout": "timeout",
    "memory": "memory limit",
    "output": "output limit",
    "files": "limit of files",
    "killed": "ended by a signal",
}
"""How a limit that a program hit is told to people and models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRunner:
    """Runs programs and their tests in `sandbox`, which is started and stopped by whoever made it.

    >>> SandboxRunner(sandbox=LocalSandbox())       # doctest: +SKIP
    """

    sandbox: Sandbox
    limits: Limits | None = None
    """Those of the sandbox where None."""

    async def run_tests(self, code: str, tests: Sequence[str | OutputCase], entry_points: EntryPoints | None = None) -> Verdict:
        """Run `code` and each of `tests`. Raises SandboxError when the sandbox broke."""
        program = Program(source=code)
        if not tests:
            result = await self.sandbox.run(program, self.limits)
            outcome = CaseOutcome(status="error" if result.reason == "ok" else result.reason, detail=result.stderr)
            return Verdict(loaded=result.ok, passed=(), reason=None if result.ok else told(outcome, "the program"))
        cases = Tests(
            cases=tuple(tests),
            entry_points=None if entry_points is None else entry_points.names,
            classes=None if entry_points is None else entry_points.classes,
        )
        verdict = await self.sandbox.run_tests(program, cases, self.limits)
        passed = tuple(outcome.status == "passed" for outcome in verdict.outcomes)
        first = next((index for index, ok in enumerate(passed) if not ok), None)
        reason = None
        if first is not None:
            where = f"test {first + 1}" if verdict.loaded else "the program itself"
            reason = told(verdict.outcomes[first], where)
        return Verdict(loaded=verdict.loaded, passed=passed, reason=reason)


def told(outcome: CaseOutcome, where: str) -> str:
    r"""Why a case did not pass, in one line.

    >>> told(CaseOutcome(status="failed", detail="assert add(1, 2) == 3\nAssertionError"), "test 2")
    'AssertionError in test 2 (assert add(1, 2) == 3)'
    """
    lines = [line.strip() for line in outcome.detail.strip().splitlines()] or [""]
    if outcome.status in LIMIT_WORDS:
        return f"{LIMIT_WORDS[outcome.status]} in {where}"
    if outcome.status == "not_run":
        return f"the time was used up before {where}"
    error = _short(lines[-1]) or "an error"
    shown = len(lines) > 1 and lines[0].startswith("assert")
    return f"{error} in {where}" + (f" ({_short(lines[0])})" if shown else "")


def _short(line: str) -> str:
    return line if len(line) <= _MOST_REASON else f"{line[:_MOST_REASON]}..."
