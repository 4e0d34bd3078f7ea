"""`code_runs` and `tests_passed`: the program of the last reply, run in a sandbox.

A limit that the program hits is scored, as it is the model's own doing. A sandbox that breaks raises, and the trajectory is
masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyturn.environments.rewards.view import TrajectoryView
from polyturn.errors import DataError, EnvironmentSetupError
from polyturn.programs import CodeRunner, OutputCase, entry_points, program_in, row_tests, syntax_problem
from polyturn.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRuns:
    """1 when the program runs to its end, tests aside; 0 when it does not, or there is none."""

    runner: CodeRunner

    async def __call__(self, view: TrajectoryView, task: Task) -> float:
        """Whatever the runner raises is a fault."""
        code = program_in(view.spoken).code
        if not code or syntax_problem(code) is not None:
            return 0.0
        return float((await self.runner.run_tests(code, ())).loaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsPassed:
    """The share of the task's tests (`tests` and `test_cases` of its row) that the program passes, to the `power`.

    Power 1 pays every test alike; a higher one pays little for half a solution; with `all_or_nothing` only a program that
    passes every test is paid.
    """

    __test__ = False  # not a class of tests, whatever its name says

    runner: CodeRunner
    power: float = 1.0
    all_or_nothing: bool = False

    def __post_init__(self) -> None:
        if not self.power > 0:
            raise EnvironmentSetupError(f"power={self.power:g} must be above 0; 1 pays every test alike")

    async def __call__(self, view: TrajectoryView, task: Task) -> float:
        """Raises DataError for a task without tests."""
        statements, tests = _tests_of(task)
        code = program_in(view.spoken).code
        if not code or syntax_problem(code) is not None:
            return 0.0
        # The reference says what is the program's to define: a helper that the tests forgot must not be the model's choice.
        names = None if task.answer is None else entry_points(program_in(task.answer).code, statements)
        verdict = await self.runner.run_tests(code, tests, names)
        if self.all_or_nothing:
            return float(verdict.all_passed)
        return float(verdict.share**self.power)


def _tests_of(task: Task) -> tuple[list[str], list[str | OutputCase]]:
    """The statements among a task's tests, and all of them. Raises DataError for a task without any."""
    given: list[Any] = [task.info.get(key) or () for key in ("tests", "test_cases")]
    if not any(given) or any(isinstance(value, str) or not isinstance(value, Sequence) for value in given):
        raise DataError(f"task {task.id} has no tests, and the reward tests_passed runs them")
    return [str(test) for test in given[0]], row_tests(*given)
