"""The driver's side of the supervisor: start it, hand it jobs, get their reports, and notice when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import polyturn
from polyturn.errors import DeadlineError, SandboxError
from polyturn.processes.deadlines import deadline
from polyturn.processes.threads import in_thread
from polyturn.sandbox import async_frames, folders, frames
from polyturn.sandbox.base import Limits
from polyturn.sandbox.confine import Means

START_S = 60.0
STOP_S = 20.0
GRACE_S = 90.0
"""What a monitor may take on top of its program's wall clock: getting ready, ending it, sending the report."""

_BOOT = """
import json, socket, sys
sys.path.append(sys.argv[1])
from polyturn.sandbox import supervisor
sys.path.remove(sys.argv[1])
supervisor.main(socket.socket(fileno=int(sys.argv[2])), json.loads(sys.argv[3]))
"""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the same program, the same order of its sets, on every machine
    "MALLOC_ARENA_MAX": "1",  # each arena would reserve 64 MiB of a program's address space
}
_MOST_HEAD = 1 << 20
_MOST_WORDS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a monitor says about its program's end: `why` is ended, timeout, memory, output, files or cancelled."""

    why: str
    status: int
    seconds: float
    cpu_s: float
    stdout: bytes
    stderr: bytes


class Pool:
    """One supervisor and the jobs it runs. Belongs to the event loop that started it."""

    def __init__(self, *, mode: str, import_paths: tuple[str, ...]) -> None:
        self._mode = mode
        self._import_paths = import_paths
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._scratch: str | None = None
        self._errors: IO[bytes] | None = None
        self._numbers = iter(range(1 << 62))
        self.means = Means()

    @property
    def alive(self) -> bool:
        """Whether the supervisor runs and listens. One that was killed stops listening well before it counts as ended."""
        if self._process is None or self._control is None or self._process.poll() is not None:
            return False
        ends = select.poll()
        ends.register(self._control, 0)  # a hang-up is told without being asked for
        return not ends.poll(0)

    @property
    def pid(self) -> int | None:
        """The supervisor's process id."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the supervisor. Raises SandboxError when it does not come up."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setblocking(False)
        self._scratch = tempfile.mkdtemp(prefix="polyturn-sandbox-")
        Path(self._scratch).chmod(0o711)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the supervisor may write to it
        settings = json.dumps({"mode": self._mode, "import_paths": self._import_paths, "scratch": self._scratch})
        self._process = _spawn(there, settings, self._errors)
        self._control = here
        try:
            async with deadline(START_S, "the sandbox's supervisor to start"):
                data = await asyncio.get_running_loop().sock_recv(here, 1 << 16)
            if not data:
                raise SandboxError(f"the sandbox's supervisor did not start: {self._last_words()}")
        except BaseException as error:
            await self.stop()
            if isinstance(error, DeadlineError):
                raise SandboxError(str(error)) from error
            raise
        self.means = Means(**json.loads(data))

    async def stop(self) -> None:
        """End the supervisor and everything it runs, and remove what lies on disk. Raises SandboxError if it won't end."""
        process, control, scratch = self._process, self._control, self._scratch
        self._process = self._control = self._scratch = None
        if control is not None:
            control.close()
        if process is not None:
            try:
                await in_thread(process.wait, STOP_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                await in_thread(process.wait, STOP_S)
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        if scratch is not None:
            await in_thread(_remove, scratch)

    async def run_with(
        self, role: str, payload: bytes, limits: Limits, channel: socket.socket | None = None, end: asyncio.Event | None = None
    ) -> Report:
        """`run` with a payload to send, and what `channel` there is besides. Raises SandboxError."""
        here, there = socket.socketpair()
        here.setblocking(False)
        with here:
            given = [there] if channel is None else [there, channel]
            job = asyncio.ensure_future(self.run(role, limits, given, end))
            try:
                await async_frames.send(here, payload)
                return await job
            finally:
                job.cancel()
                for one in given:  # in case the job was cancelled before it began
                    one.close()

    async def run(
        self, role: str, limits: Limits, descriptors: list[socket.socket], end: asyncio.Event | None = None
    ) -> Report:
        """Run one job to its end, or until `end` is set; `descriptors` are given to its process and closed here.

        Cancelled, it ends the job. Raises SandboxError when the supervisor, the monitor or the start failed.
        """
        here, there = socket.socketpair()
        here.setblocking(False)
        try:
            with here:
                with _closing([there, *descriptors]):
                    await self._order(
                        {"role": role, "limits": asdict(limits), "id": next(self._numbers)}, [there, *descriptors]
                    )
                async with deadline(limits.wall_s + GRACE_S, f"the report on a program with wall_s={limits.wall_s:g}"):
                    ending = asyncio.ensure_future(_end_when(end, here))
                    try:
                        return await self._report(here, limits)
                    finally:
                        ending.cancel()
        except (OSError, DeadlineError) as error:
            raise SandboxError(f"the sandbox could not run a program: {error}") from error

    async def _order(self, order: dict[str, Any], sockets: list[socket.socket]) -> None:
        control = self._control
        if control is None:
            raise SandboxError("the sandbox is not started; call start() first")
        data = json.dumps(order).encode()
        numbers = [one.fileno() for one in sockets]
        while True:
            try:
                socket.send_fds(control, [data], numbers)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except ConnectionError as error:
                raise SandboxError(f"the sandbox's supervisor died: {self._last_words()}") from error

    async def _report(self, stream: socket.socket, limits: Limits) -> Report:
        try:
            head = await async_frames.receive(stream, _MOST_HEAD)
            if head is None:
                raise SandboxError(f"a program's monitor died before it reported: {self._last_words()}")
            words = json.loads(head)
            bodies = [await async_frames.receive_exactly(stream, size) for size in words["sizes"]]
        except frames.FrameError as error:
            raise SandboxError(f"a program's monitor sent nonsense: {error}") from error
        if None in bodies:
            raise SandboxError("a program's monitor died while it reported")
        if "fault" in words:
            raise SandboxError(f"the sandbox could not run a program: {words['fault']}")
        return Report(
            why=words["why"],
            status=words["status"],
            seconds=words["seconds"],
            cpu_s=words["cpu_s"],
            stdout=bodies[0] or b"",
            stderr=bodies[1] or b"",
        )

    def _last_words(self) -> str:
        """The end of what the supervisor wrote to standard error."""
        if self._errors is None:
            return "it was stopped"
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _MOST_WORDS))
        words = self._errors.read().decode(errors="replace").strip()
        return words.splitlines()[-1] if words else "it left no message"


def _spawn(control: socket.socket, settings: str, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a supervisor that inherits nothing but its end of the control socket."""
    source = str(Path(polyturn.__file__).parents[1])
    with control:
        return subprocess.Popen(
            [folders.interpreter(), "-s", "-S", "-B", "-c", _BOOT, source, str(control.fileno()), settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[control.fileno()],
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )


async def _end_when(end: asyncio.Event | None, report: socket.socket) -> None:
    """Tell a monitor to end its program once `end` is set: it sees that nobody writes to it any more, and still reports."""
    if end is not None:
        await end.wait()
        with contextlib.suppress(OSError):
            report.shutdown(socket.SHUT_WR)


def _remove(folder: str) -> None:
    """Remove a folder of programs that are dead; they may be deeper than Python's own way gets."""
    subprocess.run(["rm", "-rf", folder], stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=STOP_S)


@contextlib.contextmanager
def _closing(sockets: list[socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for one in sockets:
            one.close()
