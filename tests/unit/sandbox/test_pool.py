"""A pool that breaks says so and starts anew, and one that stops leaves nothing: no process, no descriptor, no folder."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest

from parts.processes import children, descendants, gone, present
from polyturn.errors import IsolationError, ResourceError, SandboxError
from polyturn.sandbox import folders, pool
from polyturn.sandbox.base import Limits, Program, Tests
from polyturn.sandbox.local import LocalSandbox

FOREVER = Program(source="while True: pass")
LIMITS = Limits(wall_s=60)


async def test_a_supervisor_that_dies_is_an_error_of_the_sandbox_and_the_next_program_runs(caplog):
    sandbox = LocalSandbox(LIMITS)
    await sandbox.start()
    try:
        await gone(sandbox.pid)
        running = asyncio.ensure_future(sandbox.run(FOREVER))
        judged = asyncio.ensure_future(sandbox.run_tests(FOREVER, Tests(cases=("assert True",))))
        first = sandbox.pid
        await present(first, programs=2)  # one that is still on its way would run on the next supervisor
        family = descendants(first)
        os.kill(first, signal.SIGKILL)
        for job in (running, judged):
            with pytest.raises(SandboxError, match=r"monitor died|supervisor died") as caught:
                await job
            assert isinstance(caught.value, ResourceError)
        with caplog.at_level(logging.WARNING):
            assert (await sandbox.run(Program(source="print(1)"))).stdout == "1\n"
        assert "starting another" in caplog.text
        assert sandbox.pid != first
        await all_dead(family)
    finally:
        await sandbox.stop()


async def test_a_monitor_that_dies_takes_its_program_along():
    sandbox = LocalSandbox(LIMITS)
    await sandbox.start()
    try:
        await gone(sandbox.pid)
        running = asyncio.ensure_future(sandbox.run(FOREVER))
        await present(sandbox.pid)
        (monitor,) = children(sandbox.pid)
        os.kill(monitor, signal.SIGKILL)
        with pytest.raises(SandboxError, match="monitor died before it reported"):
            await running
        await gone(sandbox.pid)
        assert (await sandbox.run(Program(source="print(1)"))).stdout == "1\n"
    finally:
        await sandbox.stop()


async def test_stop_ends_what_runs():
    sandbox = LocalSandbox(LIMITS)
    await sandbox.start()
    pid = sandbox.pid
    await gone(pid)
    running = asyncio.ensure_future(sandbox.run(FOREVER))
    await present(pid)
    family = {pid, *descendants(pid)}
    await sandbox.stop()
    with pytest.raises(SandboxError):
        await running
    await all_dead(family)
    assert sandbox.pid is None


async def test_a_program_that_waits_for_its_turn_is_not_started_after_stop():
    sandbox = LocalSandbox(LIMITS, concurrency=1)
    await sandbox.start()
    await gone(sandbox.pid)
    running, waiting = (asyncio.ensure_future(sandbox.run(FOREVER)) for _ in range(2))
    await present(sandbox.pid)
    await sandbox.stop()
    for job in (running, waiting):
        with pytest.raises(SandboxError):
            await job
    assert sandbox.pid is None


async def test_a_cancelled_program_is_ended():
    sandbox = LocalSandbox(LIMITS)
    await sandbox.start()
    try:
        await gone(sandbox.pid)
        for job in (sandbox.run(FOREVER), sandbox.run_tests(FOREVER, Tests(cases=("assert True",)))):
            running = asyncio.ensure_future(job)
            await present(sandbox.pid)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await gone(sandbox.pid)
    finally:
        await sandbox.stop()


@pytest.mark.parametrize("isolation", ["auto", "filters"])
async def test_nothing_is_used_up(isolation, monkeypatch):
    # Not in pytest's folder: its parents are root's own, and the programs of root run as another user.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", name)
        await nothing_is_used_up(isolation, Path(name))


async def nothing_is_used_up(isolation, folder):
    sandbox = LocalSandbox(LIMITS, isolation=isolation)
    await sandbox.start()
    try:
        tests = Tests(cases=("assert f() == 1",))
        awkward = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w')\nos.symlink('/etc', 'a/link')\n"
        await sandbox.run(Program(source="print(1)"))
        before = open_descriptors()
        for _ in range(5):
            assert (await sandbox.run(Program(source=awkward))).ok
            assert (await sandbox.run_tests(Program(source="def f(): return 1"), tests)).all_passed
        assert open_descriptors() == before
        await gone(sandbox.pid)
        assert sorted(path for path in folder.rglob("*") if path.is_file() or path.name.isdigit()) == []
    finally:
        await sandbox.stop()
    assert list(folder.iterdir()) == []


async def test_no_more_run_at_once_than_allowed():
    sandbox = LocalSandbox(LIMITS, concurrency=1)
    await sandbox.start()
    try:
        first = asyncio.ensure_future(sandbox.run(Program(source="import time\ntime.sleep(0.3)\nprint(time.monotonic())")))
        await asyncio.sleep(0.05)
        second = await sandbox.run(Program(source="import time\nprint(time.monotonic())"))
        assert float((await first).stdout) < float(second.stdout)
    finally:
        await sandbox.stop()


async def test_a_supervisor_that_does_not_start(monkeypatch):
    monkeypatch.setattr(folders, "interpreter", lambda: "/bin/false")
    with pytest.raises(SandboxError, match="did not start: it left no message"):
        await LocalSandbox().start()
    monkeypatch.undo()
    monkeypatch.setattr(pool, "_BOOT", "raise SystemExit('the reason')")
    with pytest.raises(SandboxError, match="did not start: the reason"):
        await LocalSandbox().start()


async def test_a_supervisor_that_never_says_a_word(monkeypatch):
    monkeypatch.setattr(pool, "_BOOT", "import time; time.sleep(60)")
    monkeypatch.setattr(pool, "START_S", 0.2)
    monkeypatch.setattr(pool, "STOP_S", 0.2)
    with pytest.raises(ResourceError, match="supervisor to start"):
        await LocalSandbox().start()


async def test_what_was_asked_for_is_insisted_on(monkeypatch):
    sandbox = LocalSandbox(isolation="filters")
    await sandbox.start()
    held = {line.name: line for line in sandbox.isolation}
    await sandbox.stop()
    assert held["ends as a whole"].how == "it can't start processes (seccomp)"
    monkeypatch.setattr(
        "polyturn.sandbox.pool._BOOT",
        pool._BOOT.replace("json.loads(sys.argv[3])", '{**json.loads(sys.argv[3]), "mode": "filters"}'),
    )
    with pytest.raises(IsolationError, match="namespaces"):
        await LocalSandbox(isolation="namespaces").start()


async def test_more_folders_to_import_from(tmp_path):
    (tmp_path / "extra_module_of_a_test.py").write_text("x = 5")
    tmp_path.chmod(0o755)
    sandbox = LocalSandbox(import_paths=(str(tmp_path),))
    await sandbox.start()
    try:
        source = "import extra_module_of_a_test as m\nprint(m.x)\nopen(m.__file__, 'a')"
        result = await sandbox.run(Program(source=source))
        assert result.stdout == "5\n"
        assert result.reason == "error"
    finally:
        await sandbox.stop()
    assert (tmp_path / "extra_module_of_a_test.py").read_text() == "x = 5"


def open_descriptors() -> set[str]:
    """The descriptors of this process."""
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}


async def all_dead(pids: set[int]) -> None:
    """Wait until none of the processes is left; a zombie is dead, whoever should collect it."""
    for _ in range(3000):
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists() and state(pid) not in "ZX"]
        if not alive:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still alive: {alive}")


def state(pid: int) -> str:
    """The state letter of a process, X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
