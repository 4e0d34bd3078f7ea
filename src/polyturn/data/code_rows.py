"""Rows whose reference is a program: is it one, is it tidy, does it pass the row's own tests."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyturn.data.findings import Finding
from polyturn.data.formats import BY_NAME
from polyturn.errors import DataError
from polyturn.programs import (
    CodeRunner,
    EntryPoints,
    OutputCase,
    entry_points,
    fenced_blocks,
    program_in,
    row_tests,
    syntax_problem,
)
from polyturn.sandbox import suites
from polyturn.types import Row

STYLE_RULES = "E4,E7,F,B"
_STYLE_LIMIT_S = 60.0
_MOST_REMARKS = 3
_RUNS_AT_ONCE = 8


def is_code(row: Row) -> bool:
    """Whether the reference of a row is a program: tests score it, or it holds a block tagged as Python."""
    if row.answer is None:
        return False
    return bool(row.tests or row.test_cases) or any(tag.startswith("py") for tag, _ in fenced_blocks(row.answer))


def syntax_findings(line: int, row: Row) -> list[Finding]:
    """What is wrong with the program and the tests of a row, by their syntax alone."""
    tested = bool(row.tests or row.test_cases)
    found: list[Finding] = []
    for index, test in enumerate(row.tests):
        problem = syntax_problem(test)
        if problem:
            reason = f"tests[{index}] is not valid Python: {problem}"
            found.append(Finding(line=line, severity="error", kind="tests", reason=reason))
    if not is_code(row):
        return found
    name = BY_NAME[row.format].answer
    program = program_in(row.answer or "")
    if program.dress == "empty_fence":
        found.append(
            Finding(line=line, severity="warning", kind="code", reason=f"the code fence in {name!r} is empty: no code to run")
        )
    elif program.dress == "none":
        found.append(Finding(line=line, severity="warning", kind="code", reason=f"{name!r} holds no code"))
    elif (problem := syntax_problem(program.code)) is not None:
        reason = f"the code in {name!r} is not valid Python: {problem}"
        found.append(Finding(line=line, severity="error" if tested else "warning", kind="code", reason=reason))
    return found


def find_ruff() -> str | None:
    """The program `ruff`, where it is installed."""
    beside = Path(sys.executable).parent / "ruff"
    return str(beside) if beside.is_file() else shutil.which("ruff")


def style_findings(rows: Iterable[tuple[int, Row]], ruff: str) -> list[Finding]:
    """Remarks of ruff on the programs of `rows`, at most three a row; rows that are no valid Python are passed over."""
    with tempfile.TemporaryDirectory(prefix="polyturn-style-") as folder:
        count = 0
        for line, row in rows:
            code = program_in(row.answer or "").code
            if is_code(row) and code and syntax_problem(code) is None:
                (Path(folder) / f"{line}.py").write_text(code + "\n", encoding="utf-8")
                count += 1
        if not count:
            return []
        command = [ruff, "check", "--isolated", "--no-cache", "--exit-zero", "--output-format=json", f"--select={STYLE_RULES}"]
        try:
            run = subprocess.run([*command, folder], capture_output=True, text=True, timeout=_STYLE_LIMIT_S, check=False)
            remarks = json.loads(run.stdout)
        except (subprocess.TimeoutExpired, OSError, ValueError) as error:
            reason = f"ruff could not look at the style ({type(error).__name__})"
            return [Finding(line=0, severity="warning", kind="style", reason=reason)]
    by_line: defaultdict[int, list[str]] = defaultdict(list)
    for remark in remarks:
        words = f"line {remark['location']['row']} {remark['code']} {remark['message']}"
        by_line[int(Path(remark["filename"]).stem)].append(words)
    return [
        Finding(line=line, severity="warning", kind="style", reason=f"style: {_joined(found)}")
        for line, found in sorted(by_line.items())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference program with the tests of its row; `problem` where the row says them in a way that can't be run."""

    line: int
    code: str = ""
    tests: Sequence[str | OutputCase] = ()
    names: EntryPoints | None = None
    problem: str | None = None


def references(rows: Iterable[tuple[int, Row]], others: Iterable[tuple[int, Mapping[str, Any]]] = ()) -> list[Reference]:
    """What is to be run of `rows`, and of rows of HumanEval and MBPP among `others`, which are in no built-in format."""
    found = [_of_row(line, row) for line, row in rows if (row.tests or row.test_cases) and row.answer is not None]
    for line, fields in others:
        try:
            if {"prompt", "entry_point", "test", "canonical_solution"} <= set(fields):
                program, tests = suites.humaneval({"task_id": line, **fields})
            elif {"code", "test_list"} <= set(fields):
                program, tests = suites.mbpp({"task_id": line, "test_imports": [], **fields})
            else:
                continue
        except DataError as error:
            found.append(Reference(line=line, problem=str(error)))
            continue
        whole = [f"{tests.setup}\n{case}" for case in tests.cases if isinstance(case, str)]
        names = EntryPoints(names=tests.entry_points or (), classes=tests.classes or ())
        found.append(Reference(line=line, code=program.source, tests=whole, names=names))
    return found


async def run_references(chosen: Sequence[Reference], runner: CodeRunner) -> list[Finding]:
    """Run every reference against its row's own tests: an error for each that does not pass."""
    slots = asyncio.Semaphore(_RUNS_AT_ONCE)

    async def one(reference: Reference) -> Finding | None:
        if reference.problem is not None:
            return Finding(line=reference.line, severity="error", kind="tests", reason=reference.problem)
        async with slots:
            verdict = await runner.run_tests(reference.code, reference.tests, reference.names)
        if verdict.all_passed:
            return None
        passed = f"{sum(verdict.passed)} of {len(reference.tests)} tests pass"
        reason = f"the reference does not pass its own tests: {passed}" + (f" ({verdict.reason})" if verdict.reason else "")
        return Finding(line=reference.line, severity="error", kind="tests", reason=reason)

    found = await asyncio.gather(*(one(reference) for reference in chosen))
    return [finding for finding in found if finding is not None]


def _of_row(line: int, row: Row) -> Reference:
    code = program_in(row.answer or "").code
    if not code:
        return Reference(line=line, problem="the reference holds no program to run")
    try:
        return Reference(line=line, code=code, tests=row_tests(row.tests, row.test_cases), names=entry_points(code, row.tests))
    except DataError as error:
        return Reference(line=line, problem=str(error))


def _joined(remarks: Sequence[str]) -> str:
    shown = "; ".join(remarks[:_MOST_REMARKS])
    return shown if len(remarks) <= _MOST_REMARKS else f"{shown}; and {len(remarks) - _MOST_REMARKS} more"
