"""What every sandbox does alike, wherever it runs its programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from polyturn.errors import ConfigError, DataError, SandboxError
from polyturn.sandbox.base import MIB, Limits, Line, OutputCase, Program, Sandbox, Tests
from polyturn.sandbox.http import HttpSandbox
from polyturn.sandbox.local import LocalSandbox
from polyturn.sandbox.server import SandboxServer

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

LIMITS = Limits(wall_s=60, cpu_s=30, memory_bytes=128 * MIB, output_bytes=1 << 16, file_bytes=MIB)
KINDS = ["local", "http"]


@contextlib.asynccontextmanager
async def made(kind: str) -> AsyncIterator[Sandbox]:
    """A sandbox that is not started yet, and whatever it needs."""
    if kind == "local":
        yield LocalSandbox(LIMITS)
        return
    behind = LocalSandbox(LIMITS)
    await behind.start()
    server = SandboxServer(behind, token="a token")
    await server.start()
    try:
        yield HttpSandbox(server.url, token="a token", limits=LIMITS)
    finally:
        await server.stop()
        await behind.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def sandbox(request) -> AsyncIterator[Sandbox]:
    async with made(request.param) as sandbox:
        await sandbox.start()
        yield sandbox
        await sandbox.stop()


async def test_it_says_what_holds(sandbox: Sandbox):
    assert all(isinstance(line, Line) and line.name and line.how for line in sandbox.isolation)
    assert all(line.held for line in sandbox.isolation if line.needed)
    assert {line.name for line in sandbox.isolation if line.needed} == {
        "no network",
        "no files but its own",
        "ends as a whole",
        "memory capped",
        "number of processes capped",
    }


async def test_a_program_runs_to_its_end(sandbox: Sandbox):
    result = await sandbox.run(Program(source="import sys\nprint('out')\nprint('err', file=sys.stderr)"))
    assert (result.reason, result.ok, result.exit_code, result.signal) == ("ok", True, 0, None)
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert result.seconds >= 0
    assert result.cpu_s >= 0


async def test_an_exception_is_an_error_with_its_traceback(sandbox: Sandbox):
    result = await sandbox.run(Program(source="def f(x):\n    return 1 / x\n\nf(0)"))
    assert (result.reason, result.exit_code) == ("error", 1)
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "solution.py", line 4, in <module>'
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "polyturn" not in result.stderr


@pytest.mark.parametrize(
    ("source", "reason", "code"),
    [
        ("import sys\nsys.exit()", "ok", 0),
        ("import sys\nsys.exit(3)", "error", 3),
        ("import sys\nsys.exit('no')", "error", 1),
        ("exit()", "ok", 0),
        ("quit(2)", "error", 2),
        ("def f(:", "error", 1),
    ],
)
async def test_exit_codes(sandbox: Sandbox, source: str, reason: str, code: int):
    result = await sandbox.run(Program(source=source))
    assert (result.reason, result.exit_code) == (reason, code)


async def test_a_program_is_main_and_reads_its_input(sandbox: Sandbox):
    source = "import sys\nif __name__ == '__main__':\n    print(input(), sys.stdin.read(), sys.argv)"
    result = await sandbox.run(Program(source=source, stdin="ä\nrest\n"))
    assert result.stdout == "ä rest\n ['solution.py']\n"


async def test_long_input_and_text_from_everywhere(sandbox: Sandbox):
    text = "grüße 你好 🙂 " * 20_000
    result = await sandbox.run(Program(source="print(len(input()), '\\u05d0')", stdin=text))
    assert result.stdout == f"{len(text)} \u05d0\n"


async def test_files_are_there_and_the_folder_is_its_own(sandbox: Sandbox):
    source = """
import os, pathlib, helper, tempfile
print(pathlib.Path("data/raw.bin").read_bytes(), helper.x)
pathlib.Path("new").write_text("x")
with tempfile.NamedTemporaryFile() as file:
    file.write(b"y")
print(sorted(os.listdir(".")), pathlib.Path.home() == pathlib.Path.cwd())
"""
    files = {"data/raw.bin": b"\x00\xff", "helper.py": b"x = 5"}
    first = await sandbox.run(Program(source=source, files=files))
    assert first.stdout == "b'\\x00\\xff' 5\n['data', 'helper.py', 'new'] True\n"
    second = await sandbox.run(Program(source="import os\nprint(os.listdir('.'))"))
    assert second.stdout == "[]\n"


async def test_the_standard_library_is_there_and_nothing_else(sandbox: Sandbox):
    source = """
import asyncio, bisect, collections, csv, datetime, decimal, fractions, heapq
import itertools, json, random, re, statistics, unittest
async def main():
    await asyncio.sleep(0)
    return 5
print(asyncio.run(main()))
try:
    import numpy
except ImportError:
    print("no numpy")
"""
    assert (await sandbox.run(Program(source=source))).stdout == "5\nno numpy\n"


async def test_the_same_program_gives_the_same_output(sandbox: Sandbox):
    source = "print({f'{i}' for i in range(50)}, hash('x'))"
    assert len({(await sandbox.run(Program(source=source))).stdout for _ in range(3)}) == 1


async def test_random_numbers_are_not_the_same_in_all(sandbox: Sandbox):
    source = "import random\nprint(random.random())"
    assert len({(await sandbox.run(Program(source=source))).stdout for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("source", "limits", "reason"),
    [
        ("while True: pass", {"wall_s": 0.3}, "timeout"),
        ("while True: pass", {"cpu_s": 1}, "timeout"),
        ("x = bytearray(1 << 30)", {}, "memory"),
        ("while True: print('x' * 999)", {}, "output"),
        ("import os\nos.kill(os.getpid(), 9)", {}, "killed"),
        ("open('x', 'wb').write(bytes(2 << 20))", {}, "error"),
    ],
    ids=["wall", "cpu", "memory", "output", "signal", "file"],
)
async def test_a_limit_is_a_result(sandbox: Sandbox, source: str, limits: dict[str, float], reason: str):
    values = {name: getattr(LIMITS, name) for name in Limits.__slots__} | limits
    result = await sandbox.run(Program(source=source), Limits(**values))
    assert result.reason == reason, result
    assert not result.ok


async def test_what_was_written_before_a_limit_is_kept(sandbox: Sandbox):
    result = await sandbox.run(Program(source="print('so far')\nwhile True: pass"), Limits(wall_s=0.3))
    assert (result.reason, result.stdout) == ("timeout", "so far\n")


async def test_many_at_once_keep_their_own_results(sandbox: Sandbox):
    results = await asyncio.gather(*[sandbox.run(Program(source=f"print({number})")) for number in range(20)])
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(20)]


async def test_a_verdict_case_by_case(sandbox: Sandbox):
    program = Program(source="def double(x):\n    print('called')\n    return x + x")
    cases = ("assert double(2) == 4", "assert double(2) == 5", "assert double(None) == 0", "nonsense(")
    verdict = await sandbox.run_tests(program, Tests(cases=cases))
    assert [outcome.status for outcome in verdict.outcomes] == ["passed", "failed", "error", "error"]
    assert (verdict.passed, verdict.total, verdict.all_passed, verdict.reason) == (1, 4, False, "failed")
    assert verdict.outcomes[1].detail == "assert double(2) == 5\nAssertionError"
    assert verdict.outcomes[2].detail.splitlines()[0] == "assert double(None) == 0"
    assert 'File "solution.py", line 3, in double' in verdict.outcomes[2].detail
    assert "SyntaxError" in verdict.outcomes[3].detail
    assert verdict.stdout == "called\n" * 3


async def test_output_cases(sandbox: Sandbox):
    cases = (
        OutputCase(stdin="2 3\n", stdout="5\n"),
        OutputCase(stdin="2 2\n", stdout="4  \n\n"),
        OutputCase(stdin="1 1\n", stdout="3"),
        OutputCase(stdin="x", stdout=""),
    )
    program = Program(source="a, b = map(int, input().split())\nprint(a + b)")
    verdict = await sandbox.run_tests(program, Tests(cases=cases))
    assert [outcome.status for outcome in verdict.outcomes] == ["passed", "passed", "failed", "error"]
    assert "ValueError" in verdict.outcomes[3].detail


async def test_a_case_that_ends_the_program_costs_only_itself(sandbox: Sandbox):
    source = "import os\ndef f(x):\n    if x == 1:\n        os._exit(0)\n    if x == 2:\n        while True: pass\n    return x"
    cases = (*(f"assert f({number}) == {number}" for number in range(4)), OutputCase(stdin="", stdout=""))
    verdict = await sandbox.run_tests(Program(source=source), Tests(cases=cases, case_s=0.4))
    assert [outcome.status for outcome in verdict.outcomes] == ["passed", "error", "timeout", "passed", "passed"]


async def test_a_program_that_does_not_load_fails_every_case(sandbox: Sandbox):
    verdict = await sandbox.run_tests(Program(source="raise ValueError('no')"), Tests(cases=("assert True", "assert True")))
    assert [outcome.status for outcome in verdict.outcomes] == ["error", "error"]
    assert "ValueError: no" in verdict.outcomes[0].detail


async def test_no_cases_are_no_success(sandbox: Sandbox):
    verdict = await sandbox.run_tests(Program(source="x = 1"), Tests(cases=()))
    assert (verdict.total, verdict.passed, verdict.all_passed) == (0, 0, False)


async def test_a_setup_that_fails_is_said(sandbox: Sandbox):
    verdict = await sandbox.run_tests(Program(source="x = 1"), Tests(setup="import nothing_like_this", cases=("assert True",)))
    assert verdict.outcomes[0].status == "error"
    assert "the setup of the tests failed" in verdict.outcomes[0].detail


async def test_files_that_do_not_fit_are_the_users_mistake(sandbox: Sandbox):
    with pytest.raises(DataError, match="more than the program's folder may hold"):
        await sandbox.run(Program(source="", files={"big": bytes(2 * MIB)}))


async def test_a_cancelled_run_leaves_the_others_alone(sandbox: Sandbox):
    endless = asyncio.ensure_future(sandbox.run(Program(source="while True: pass")))
    await asyncio.sleep(0.1)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    assert (await sandbox.run(Program(source="print(1)"))).stdout == "1\n"


@pytest.mark.parametrize("kind", KINDS)
async def test_it_must_be_started(kind: str):
    async with made(kind) as sandbox:
        with pytest.raises(SandboxError, match="call start"):
            await sandbox.run(Program(source=""))
        with pytest.raises(SandboxError, match="call start"):
            await sandbox.run_tests(Program(source=""), Tests(cases=("",)))


@pytest.mark.parametrize("kind", KINDS)
async def test_it_can_be_started_again(kind: str):
    async with made(kind) as sandbox:
        for _ in range(2):
            await sandbox.start()
            assert (await sandbox.run(Program(source="print(1)"))).ok
            await sandbox.stop()


async def test_limits_and_programs_that_make_no_sense():
    with pytest.raises(ConfigError, match=r"wall_s=0 must be more than 0"):
        Limits(wall_s=0)
    with pytest.raises(ConfigError, match=r"memory_bytes=1024 is less than Python needs"):
        Limits(memory_bytes=1024)
    for name in ("/etc/passwd", "../x", "a/../../x", "", "a\0b", "a\ud800"):
        with pytest.raises(DataError, match="must be relative and stay"):
            Program(source="", files={name: b""})
    with pytest.raises(DataError, match="is also a folder"):
        Program(source="", files={"a": b"", "a/b": b""})
    for name in ("x" * 256, "/".join(["x"] * 1500)):
        with pytest.raises(DataError, match="longer than a disk takes"):
            Program(source="", files={name: b""})
    with pytest.raises(DataError, match="use a name that no other module has"):
        Tests(cases=(), module="json")
    with pytest.raises(DataError, match="must be more than 0"):
        Tests(cases=(), case_s=0)
