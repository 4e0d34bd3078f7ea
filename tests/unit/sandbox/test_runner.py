"""The adapter from a sandbox to `CodeRunner`, with the local sandbox behind it, on the rows that were made to go wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from polyturn.data.code_rows import references, run_references
from polyturn.data.load import load_formatted
from polyturn.errors import SandboxError
from polyturn.programs import EntryPoints, OutputCase
from polyturn.sandbox.base import MIB, CaseOutcome, Limits
from polyturn.sandbox.http import HttpSandbox
from polyturn.sandbox.local import LocalSandbox
from polyturn.sandbox.runner import SandboxRunner, told

pytestmark = pytest.mark.asyncio(loop_scope="module")
DIRTY = Path(__file__).parents[2] / "data" / "dirty_inputs"
LIMITS = Limits(wall_s=0.8, cpu_s=1, memory_bytes=128 * MIB, output_bytes=1 << 16)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[LocalSandbox]:
    sandbox = LocalSandbox(LIMITS, concurrency=4)
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


@pytest.fixture
def runner(sandbox: LocalSandbox) -> SandboxRunner:
    return SandboxRunner(sandbox=sandbox)


async def test_a_verdict_test_by_test(runner: SandboxRunner):
    tests = ("assert add(1, 2) == 3", "assert add(1, 1) == 3", OutputCase(stdin="", stdout="loaded\n"))
    verdict = await runner.run_tests("print('loaded')\ndef add(a, b): return a + b", tests)
    assert (verdict.loaded, verdict.passed) == (True, (True, False, True))
    assert verdict.reason == "AssertionError in test 2 (assert add(1, 1) == 3)"
    assert (await runner.run_tests("def add(a, b): return a + b", tests[:1])).all_passed


async def test_without_tests_the_question_is_whether_it_ends(runner: SandboxRunner):
    assert (await runner.run_tests("x = 1", ())).loaded
    ended = await runner.run_tests("raise ValueError('no')", ())
    assert (ended.loaded, ended.passed, ended.reason) == (False, (), "ValueError: no in the program")
    assert (await runner.run_tests("while True: pass", ())).reason == "timeout in the program"


async def test_a_program_that_does_not_load(runner: SandboxRunner):
    verdict = await runner.run_tests("1 / 0", ("assert True", "assert f()"))
    assert (verdict.loaded, verdict.passed) == (False, (False, False))
    assert verdict.reason == "ZeroDivisionError: division by zero in the program itself"
    assert not (await runner.run_tests("import os\nos._exit(0)", ("assert True",))).loaded
    assert (await runner.run_tests("def f(): return 1 / 0", ("assert f()",))).loaded


async def test_entry_points_keep_helpers_out_of_the_programs_hands(runner: SandboxRunner):
    program = "def f(x): return 1\ndef close(a, b): return True"
    tests = ("assert close(f(2), 4)",)
    assert (await runner.run_tests(program, tests)).all_passed, "nobody said whose `close` is"
    verdict = await runner.run_tests(program, tests, EntryPoints(names=("f",)))
    assert verdict.reason == "NameError: name 'close' is not defined in test 1 (assert close(f(2), 4))"


@pytest.mark.parametrize("name", [pytest.param("tests_loop_forever", marks=pytest.mark.real), "code_fence_response"])
async def test_references_end_as_the_manifest_says(runner: SandboxRunner, name: str):
    manifest = json.loads((DIRTY / "manifest.json").read_text())
    (entry,) = [entry for entry in manifest["files"] if entry["file"] == f"{name}.jsonl"]
    rows = load_formatted(str(DIRTY / f"{name}.jsonl"), None, need_answer=False)
    chosen = references([(int(row.where.rpartition(":")[2]), row) for row in rows])
    findings = await run_references(chosen, runner)
    assert len(chosen) == len(entry["expected_run"])
    reasons = {finding.line: finding.reason for finding in findings}
    for expected in entry["expected_run"]:
        reason, result = reasons.get(expected["line"]), expected["result"]
        if result.startswith("pass"):
            assert reason is None
        elif result == "fail":
            assert reason is not None
            assert "timeout" not in reason
        else:
            assert reason is not None
            assert any(word.strip() in reason for word in result.split(" or ")), (expected, reason)


@pytest.mark.parametrize("name", ["humaneval_4", "mbpp_12"])
async def test_references_of_humaneval_and_mbpp_are_run(runner: SandboxRunner, name: str):
    rows = [json.loads(line) for line in (DIRTY.parent / f"{name}.jsonl").read_text().splitlines()]
    chosen = references([], enumerate(rows, 1))
    assert len(chosen) == len(rows)
    assert await run_references(chosen, runner) == []
    wrong = {"canonical_solution": "    return None\n", "code": "def first_repeated_char(s):\n    return None"}
    (finding,) = await run_references(
        references([], [(1, {**rows[0], **{k: wrong[k] for k in wrong if k in rows[0]}})]), runner
    )
    assert "the reference does not pass its own tests: " in finding.reason
    (finding,) = await run_references(references([], [(1, {"code": "def f(", "test_list": ["assert f()"]})]), runner)
    assert "is no Python" in finding.reason
    assert references([], [(1, {"question": "x"})]) == []


async def test_a_sandbox_that_breaks_is_no_verdict():
    sandbox = LocalSandbox(LIMITS)
    await sandbox.start()
    try:
        runner = SandboxRunner(sandbox=sandbox)
        assert sandbox.pid is not None
        killer = "import time\ndef f(): time.sleep(60)"
        os.kill(sandbox.pid, signal.SIGSTOP)  # so that it can't have answered when it is gone
        asking = asyncio.ensure_future(runner.run_tests(killer, ("assert f()",)))
        await asyncio.sleep(0.05)
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await asking
        assert (await runner.run_tests("def f(): return 1", ("assert f()",))).all_passed, "the next one starts another pool"
    finally:
        await sandbox.stop()


async def test_a_supervisor_that_no_longer_listens_is_replaced_though_it_still_ends():
    sandbox = LocalSandbox(LIMITS)
    await sandbox.start()
    try:
        pool, first = sandbox._pool, sandbox.pid
        assert pool.alive
        assert pool._process is not None
        assert pool._control is not None
        pool._process.poll = lambda: None  # type: ignore[method-assign] # as if the kernel had not finished with it
        pool._control.shutdown(socket.SHUT_RDWR)
        assert not pool.alive
        result = await SandboxRunner(sandbox=sandbox).run_tests("def f(): return 1", ("assert f()",))
        assert result.all_passed
        assert sandbox.pid != first
    finally:
        await sandbox.stop()


async def test_a_server_that_is_gone_is_no_verdict():
    with pytest.raises(SandboxError):
        await SandboxRunner(sandbox=HttpSandbox("http://127.0.0.1:9", limits=LIMITS)).run_tests("x = 1", ())


@pytest.mark.parametrize(
    ("status", "detail", "said"),
    [
        ("memory", "the program was ended: memory", "memory limit in test 1"),
        ("killed", "", "ended by a signal in test 1"),
        ("not_run", "the time of all cases was used up", "the time was used up before test 1"),
        ("error", "", "an error in test 1"),
        ("error", "ValueError: " + "x" * 400, "ValueError: " + "x" * 288 + "... in test 1"),
    ],
)
async def test_reasons(status, detail, said):
    assert told(CaseOutcome(status=status, detail=detail), "test 1") == said
