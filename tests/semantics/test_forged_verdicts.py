"""Programs that try to pass tests without doing what is tested: none does, and the pool and the other programs never notice.

For each of them an honest program passes the same tests, so that a sandbox which fails everybody would be found out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from parts.forgers import ADD, FORGERS, HONEST_ADD, HUNT_MEMORY, HUNT_OBJECTS, Forger
from parts.processes import gone
from polyturn.sandbox.base import MIB, Limits, Program, Tests
from polyturn.sandbox.local import LocalSandbox

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

LIMITS = Limits(wall_s=60, cpu_s=30, memory_bytes=192 * MIB, num_processes=12, output_bytes=1 << 16)
ENDLESS = [
    ("def add(a, b):\n    while True:\n        pass", "timeout"),
    ("held = []\ndef add(a, b):\n    while True:\n        held.append(bytearray(1 << 20))", "error"),
    ("def add(a, b):\n    while True:\n        print('x' * 1000)", "output"),
    ("while True:\n    pass", "timeout"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[LocalSandbox]:
    """One pool for all of them."""
    sandbox = LocalSandbox(LIMITS)
    await sandbox.start()
    first = sandbox.pid
    yield sandbox
    assert sandbox.pid == first, "a program brought the pool down"
    await sandbox.stop()


@pytest.mark.parametrize("forger", FORGERS, ids=lambda forger: forger.name.replace(" ", "-").replace("'", ""))
async def test_it_does_not_pass(forger: Forger, sandbox: LocalSandbox):
    verdict = await sandbox.run_tests(Program(source=forger.source), forger.tests)
    assert verdict.total == forger.tests.total
    assert verdict.passed == 0, verdict
    assert verdict.reason != "passed"
    await gone(sandbox.pid)


@pytest.mark.parametrize(
    ("honest", "tests"), sorted({(forger.honest, forger.tests) for forger in FORGERS if forger.honest}, key=str)
)
async def test_an_honest_program_passes_the_same_tests(honest: str, tests: Tests, sandbox: LocalSandbox):
    verdict = await sandbox.run_tests(Program(source=honest), tests)
    assert verdict.all_passed, verdict
    assert [outcome.detail for outcome in verdict.outcomes] == [""] * tests.total


@pytest.mark.parametrize(("source", "status"), ENDLESS, ids=["loop", "memory", "output", "loop-at-import"])
async def test_what_has_no_end_is_judged_by_its_limit(source: str, status: str, sandbox: LocalSandbox):
    limits = Limits(wall_s=0.4 if status == "timeout" else 60, memory_bytes=64 * MIB, output_bytes=1 << 16)
    verdict = await sandbox.run_tests(Program(source=source), ADD, limits)
    assert verdict.passed == 0
    assert verdict.reason == status, verdict
    await gone(sandbox.pid)


async def test_a_generator_without_end_runs_into_the_clock(sandbox: LocalSandbox):
    tests = Tests(cases=("assert next(numbers()) == 0", "assert 0 not in numbers()"))
    verdict = await sandbox.run_tests(Program(source="import itertools\nnumbers = itertools.count"), tests, Limits(wall_s=60))
    assert [outcome.status for outcome in verdict.outcomes] == ["passed", "failed"]
    endless = Tests(cases=("assert list(numbers()) == []",))
    verdict = await sandbox.run_tests(
        Program(source="import itertools\nnumbers = itertools.count"), endless, Limits(wall_s=0.3)
    )
    assert verdict.reason == "timeout"


@pytest.mark.parametrize("hunt", [HUNT_OBJECTS, HUNT_MEMORY], ids=["objects", "memory"])
async def test_the_hunters_would_find_what_is_there(hunt: str, sandbox: LocalSandbox):
    there = "kept = ['assert add(17, 25) == 42']\nprint(bool(hunt()))"
    assert (await sandbox.run(Program(source=f"{hunt}\n{there}"))).stdout == "True\n"


async def test_the_tests_may_not_end_either(sandbox: LocalSandbox):
    tests = Tests(cases=("while True:\n    add(1, 1)", "assert add(1, 1) == 2"), case_s=None)
    verdict = await sandbox.run_tests(Program(source=HONEST_ADD), tests, Limits(wall_s=0.3))
    assert [outcome.status for outcome in verdict.outcomes] == ["timeout", "not_run"]


async def test_there_are_enough_of_them():
    assert len({forger.name for forger in FORGERS}) == len(FORGERS) >= 50
