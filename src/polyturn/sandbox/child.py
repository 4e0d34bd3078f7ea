"""The process a program runs in: gets ready while it is still trusted, gives everything up, then runs the source.

What it reads from its payload socket belongs to it: a program gets its source, a tests process its tests, and neither sees the
other's.
"""

from __future__ import annotations

import atexit
import base64
import fcntl
import json
import os
import site
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from polyturn.sandbox import candidate, confine, folders, frames, kernel, sources, tester
from polyturn.sandbox.monitor import READY, Job

MOST_PAYLOAD = 1 << 30

Role = Callable[[dict[str, Any], socket.socket, "socket.socket | None"], None]
"""What a process is for, given its payload, the socket it came by, and the channel between program and tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What one process is started for. `given` are the payload socket and, for tests and what they test, the channel."""

    role: str
    given: tuple[int, ...]
    readable: list[str]

    def run(self, job: Job, status: int) -> None:
        """Get ready, say so, run. Raises whatever goes wrong before the program's own code; does not return after."""
        payload_socket = socket.socket(fileno=self.given[0])
        channel = socket.socket(fileno=self.given[1]) if len(self.given) > 1 else None
        payload_socket.setblocking(True)
        data = frames.receive(payload_socket, MOST_PAYLOAD)
        if data is None:
            raise ConnectionError("the driver left before it sent the program")
        payload = json.loads(data)
        del data
        keeps_payload_socket = self.role == "tests"
        if not keeps_payload_socket:
            payload_socket.close()
        _open_stdin(payload.pop("stdin", ""))
        kept = {0, 1, 2, status, *(self.given[1:])} | ({self.given[0]} if keeps_payload_socket else set())
        kernel.close_all_but(kept)
        folder = job.folder or folders.BOX
        confine.become(confine.uid_of(job.means, job.slot))
        _settle_in(Path(folder), payload.pop("files", {}))
        confine.lock_down(
            job.means, job.limits, folder=folder, address_space_bytes=job.address_space_bytes, readable=self.readable
        )
        if not job.means.namespaces and os.getppid() != job.monitor:
            os._exit(1)
        os.write(status, READY)
        os.close(status)
        _ROLES[self.role](payload, payload_socket, channel)
        os._exit(0)


def _open_stdin(text: str) -> None:
    """Standard input from memory: any length, and the program can seek in it, but not write to it."""
    memory = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(text.encode("utf-8", "surrogatepass"))
    while view:
        view = view[os.write(memory, view) :]
    os.lseek(memory, 0, os.SEEK_SET)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    os.dup2(memory, 0)
    os.close(memory)


def _settle_in(folder: Path, files: dict[str, str]) -> None:
    """Make the folders, write the files, and leave no trace of the parent's environment."""
    for name in folders.SUBFOLDERS:
        (folder / name).mkdir(exist_ok=True)
    work = folder / "work"
    for name, encoded in files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(encoded))
    os.chdir(work)
    os.environ.clear()
    os.environ.update(
        PATH="/usr/bin:/bin", HOME=str(work), TMPDIR=str(folder / "tmp"), LANG="C.UTF-8", PYTHONHASHSEED="0", PYTHONUTF8="1"
    )
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(  # type: ignore[misc]
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )
    sys.argv = [sources.SOURCE]
    sys.path.insert(0, str(work))
    site.setquit()
    site.sethelper()


def _program(payload: dict[str, Any], payload_socket: socket.socket, channel: socket.socket | None) -> None:
    """Run a whole program as `__main__`, and end as the interpreter would."""
    code = 1
    try:
        sources.run(payload["source"], "__main__")
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        sys.stderr.write(sources.explain(error))
    _finish(code)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _finish(code: int) -> NoReturn:
    """Wait for threads, call exit handlers, flush, leave."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


_ROLES: dict[str, Role] = {"program": _program, "candidate": candidate.serve, "tests": tester.serve}
