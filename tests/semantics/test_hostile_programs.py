"""Programs that mean harm are contained and scored right, the pool outlives each of them, and nothing of them stays.

`attempts` print ESCAPED when they reach what they must not. After every program: another one runs as it should, no process that
descends from the sandbox is left, and the test's own folder is as it was.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from parts.hostile import PROGRAMS, REACHING_OUT, SECRET, Hostile
from parts.processes import gone, present
from polyturn.sandbox.base import MIB, Limits, Program
from polyturn.sandbox.local import LocalSandbox

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

LIMITS = Limits(
    wall_s=60,
    cpu_s=30,
    memory_bytes=128 * MIB,
    num_processes=12,
    output_bytes=1 << 16,
    file_bytes=MIB,
    num_files=64,
    open_files=40,
)
SHORT = Limits(**{**{name: getattr(LIMITS, name) for name in Limits.__slots__}, "wall_s": 0.3})
MODES = [pytest.param("auto", id="auto"), pytest.param("filters", id="filters", marks=pytest.mark.real)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODES)
async def sandbox(request) -> AsyncIterator[LocalSandbox]:
    """One pool for all of them; that it lives to the end is part of the test."""
    os.environ["POLYTURN_TEST_SECRET"] = SECRET
    sandbox = LocalSandbox(LIMITS, isolation=request.param)
    await sandbox.start()
    first = sandbox.pid
    yield sandbox
    assert sandbox.pid == first, "a program brought the pool down"
    await sandbox.stop()
    del os.environ["POLYTURN_TEST_SECRET"]


@pytest.fixture(scope="module")
def bait(tmp_path_factory) -> Iterator[dict[str, object]]:
    """Things of the machine that programs try to reach: a file, a port and a socket that somebody listens on."""
    folder = tmp_path_factory.mktemp("bait")
    (folder / "secret").write_text(SECRET)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        unix.bind(str(folder / "socket"))
        unix.listen()
        abstract.bind(f"\0{folder}/socket")
        abstract.listen()
        for listener in (tcp, unix, abstract):
            listener.setblocking(False)
        yield {
            "folder": folder,
            "port": tcp.getsockname()[1],
            "socket": folder / "socket",
            "secret": SECRET,
            "listeners": (tcp, unix, abstract),
        }


def look(folder: Path) -> dict[str, tuple[int, int, str]]:
    """What a folder holds: kind, time of change and content."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_text() if path.is_file() else "",
        )
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("hostile", PROGRAMS, ids=lambda hostile: hostile.name.replace(" ", "-").replace("'", ""))
async def test_it_is_contained(hostile: Hostile, sandbox: LocalSandbox, bait: dict[str, object], request):
    before = look(bait["folder"])
    source = hostile.source.format(**bait) if hostile.attempts else hostile.source
    result = await sandbox.run(Program(source=source), SHORT if hostile.loops else LIMITS)

    reasons = hostile.filters if hostile.filters and "filters" in request.node.name else hostile.reasons
    assert result.reason in reasons, result
    assert "ESCAPED" not in result.stdout + result.stderr, result.stdout
    assert SECRET not in result.stdout + result.stderr
    if result.reason in hostile.reasons:
        assert hostile.says in result.stdout + result.stderr
    assert len(result.stdout) + len(result.stderr) <= LIMITS.output_bytes

    await gone(sandbox.pid)
    assert look(bait["folder"]) == before
    for listener in bait["listeners"]:
        with pytest.raises(BlockingIOError):
            listener.accept()
    fine = await sandbox.run(Program(source="print(6 * 7)"))
    assert (fine.reason, fine.stdout) == ("ok", "42\n")


async def test_there_are_enough_of_them():
    assert len({hostile.name for hostile in PROGRAMS}) == len(PROGRAMS) >= 50
    assert len(REACHING_OUT) >= 15


async def test_a_program_sees_nothing_of_another(sandbox: LocalSandbox):
    waits = f"""
import os, time
for place in (".", os.environ["TMPDIR"]):
    open(place + "/mine", "w").write("{SECRET}")
time.sleep(60)
"""
    searches = """
import os, time
for _ in range(5):
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/box", os.path.dirname(os.path.dirname(os.getcwd()))):
        if folder == "/":
            continue
        for path, folders, files in os.walk(folder):
            if "mine" in files:
                print("FOUND", path)
    for pid in set(range(1, 60)) - {os.getpid()}:
        for way in ("cwd", "root/box/work", "root/tmp"):
            if os.path.exists(f"/proc/{pid}/{way}/mine"):
                print("FOUND", pid, way)
    time.sleep(0.1)
"""
    await gone(sandbox.pid)
    waiting = asyncio.ensure_future(sandbox.run(Program(source=waits)))
    try:
        await present(sandbox.pid)
        found = await sandbox.run(Program(source=searches))
    finally:
        waiting.cancel()
    assert "FOUND" not in found.stdout, found
    assert found.ok
    await gone(sandbox.pid)


async def test_many_at_once_leave_nothing(sandbox: LocalSandbox):
    chosen = [hostile for hostile in PROGRAMS if not hostile.attempts]
    results = await asyncio.gather(*[sandbox.run(Program(source=hostile.source), SHORT) for hostile in chosen[:6]])
    assert len(results) == 6
    await gone(sandbox.pid)
    assert (await sandbox.run(Program(source="print(1)"))).stdout == "1\n"
