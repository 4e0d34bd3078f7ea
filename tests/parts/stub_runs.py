"""Runs of stub roles in processes of their own, and the question whether anything of one is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from parts.patience import PATIENCE_S
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.heartbeat import read_heartbeat

MARK = "POLYTURN_TEST_MARK"
HERE = Path(__file__).parent
PATIENCE = {"silence_s": 30.0, "stop_grace_s": 10.0, "save_s": 30.0, "settle_s": 0.2, "look_s": 0.05, "sweep_s": 0.1}


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    out: str
    err: str


def eventually(condition: Any, what: str) -> Any:
    """Ask until the answer is true, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.03)
    return answer


def runs(pid: int) -> bool:
    """Whether a process runs; one that is dead and that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stub(name: str, *actions: str, needs: tuple[str, ...] = (), members: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """A role that does what `actions` say (see `parts.stub_role`)."""
    argv = [sys.executable, "-I", "-S", str(HERE / "stub_role.py"), name, *actions]
    return {
        "name": name,
        "argv": argv,
        "environment": {},
        "start_deadline_s": PATIENCE_S,
        "needs": needs,
        "members": members,
    } | more


def engine(number: int = 0, *actions: str, **more: Any) -> dict[str, Any]:
    """A server that serves until it is ended."""
    return stub(f"engine-{number}", "serve", "beat", *(actions or ("forever",)), **more)


def trainer(*actions: str, needs: tuple[str, ...] = ("engine-0",), **more: Any) -> dict[str, Any]:
    """An agent that plays its only rank itself."""
    actions = ("become|trainer-0", "beat", *(actions or ("forever",)))
    return stub("trainer-agent", *actions, needs=needs, members=("trainer-0",), **more)


@dataclass(frozen=True)
class Owner:
    """A process that holds a socket."""

    cmdline: str
    parent: int
    environment: str


def held_files(process: Path) -> set[str]:
    """What a process has open; some of it may be closed meanwhile."""
    found = set()
    for link in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(link.readlink()))
    return found


def answers(port: int) -> bool:
    """Whether anybody takes a connection."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def listeners(port: int) -> Iterator[Owner]:
    """The processes that listen at `port` of any IPv4 address."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {line[9] for line in lines if line[3] == "0A" and int(line[1].rpartition(":")[2], 16) == port}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if any(f"socket:[{inode}]" in held_files(folder) for inode in inodes):
                    yield Owner(
                        cmdline=f"{folder.name}: {(folder / 'cmdline').read_bytes().decode()}",
                        parent=int((folder / "stat").read_text().rpartition(")")[2].split()[1]),
                        environment=(folder / "environ").read_bytes().decode(errors="replace"),
                    )


class StubRun:
    """One run: start it, look at it, wait for its end; then nothing of it may be left."""

    def __init__(self, folder: Path, *roles: dict[str, Any], **patience: float) -> None:
        self.folder = RunFolder.create(folder, "run")
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._plan = folder / "plan.json"
        self._plan.write_text(json.dumps({"folder": str(self.folder.root), "roles": roles, "patience": PATIENCE | patience}))
        environment = {"PYTHONPATH": str(HERE.parents[1] / "src"), "TMPDIR": str(self.temporary), MARK: self.mark}
        self._files = [(folder / name).open("w+") for name in ("out.txt", "err.txt")]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "stub_run.py"), str(self._plan)],
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            env=os.environ | environment,
            start_new_session=True,
        )

    # ── looking ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def out(self) -> str:
        return Path(self._files[0].name).read_text()

    @property
    def err(self) -> str:
        return Path(self._files[1].name).read_text()

    def log(self, role: str) -> str:
        path = self.folder.logs / f"{role}.log"
        return path.read_text() if path.exists() else ""

    def pid(self, role: str) -> int:
        """The process of a role, once it has a heartbeat."""
        beat = eventually(lambda: read_heartbeat(self.folder.heartbeats / f"{role}.json"), f"a heartbeat of {role}")
        return int(beat.pid)

    @property
    def supervisor(self) -> int:
        """The supervisor's process, once it is up."""
        eventually(lambda: "supervisor is up" in self.out, "the start of the supervisor")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def kill(self, role: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(role), number)

    # ── ending ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def end(self) -> Ended:
        """Wait for the end, and look whether anything is left."""
        code = self.process.wait(PATIENCE_S)
        self.assert_nothing_left()
        return Ended(code, self.out, self.err)

    def assert_nothing_left(self) -> None:
        eventually(lambda: not self.left(), f"the end of {self.left()}")
        for path in self.folder.roles.glob("*.json"):
            port = int(json.loads(path.read_text())["address"].rpartition(":")[2])
            assert self.own_listeners(port) == [], f"somebody still listens for {path.stem}"
        assert list(self.temporary.iterdir()) == [], "files outside of the run folder"
        assert [path for path in Path("/dev/shm").iterdir() if self.mark in path.name] == []

    def own_listeners(self, port: int) -> list[str]:
        """Who listens at `port` and may be of this run. Ports are given out anew at once, so others may be there already.

        Others have a parent that lives, and not the mark; what a run left behind has lost its parents.
        """
        owners = list(listeners(port)) if answers(port) else []
        if not owners:
            return ["nobody that can be found"] if answers(port) else []
        return [owner.cmdline for owner in owners if owner.parent == 1 or f"{MARK}={self.mark}" in owner.environment]

    def left(self) -> list[str]:
        """Whoever has the mark of this run in its environment."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                        found.append(f"{folder.name}: {(folder / 'cmdline').read_bytes().decode()}")
        return found

    def close(self) -> None:
        """Whatever a test that failed left behind."""
        for file in self._files:
            file.close()
        for line in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        self.process.wait(PATIENCE_S)


@pytest.fixture
def stub_run(tmp_path: Path) -> Iterator[Any]:
    """`stub_run(role, ..., patience=...)` starts a run of stubs."""
    runs: list[StubRun] = []

    def start(*roles: dict[str, Any], **patience: float) -> StubRun:
        runs.append(StubRun(tmp_path, *roles, **patience))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
