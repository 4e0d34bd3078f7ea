"""One program's monitor: starts it, reads what it writes, holds it to its limits from outside, ends it, and reports.

    supervisor ── monitor ── init (process 1 of the program's pid namespace) ── the program

The monitor lives outside the program's namespaces, so nothing the program does reaches it. Init collects the dead and watches
memory; when the program has ended, or the monitor kills init, the kernel ends whatever is left in the namespace. Without
namespaces the program is the monitor's own child, and can't start processes.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from polyturn.sandbox import confine, folders, frames, kernel
from polyturn.sandbox.base import Limits
from polyturn.sandbox.confine import Means

START_S = 60.0
"""How long the program's process may take to get ready, which is this room's own work."""
WATCH_S = 0.05
READY = b"ready\n"

_OWN_FOLDERS = len(folders.SUBFOLDERS)
_FOLDER_BYTES = 4096  # what a folder itself takes on most disks
_PIPE_READ = 1 << 16
_REPORT_S = 60.0
_ENDED = struct.Struct("!cid")  # why (e: ended, m: memory), wait status, processor seconds


@dataclass(slots=True, kw_only=True)
class Job:
    """What the monitor knows of one program; its source and tests pass it by. `folder` is None where `/box` is mounted."""

    slot: int
    limits: Limits
    means: Means
    address_space_bytes: int
    """Of the interpreter itself, before the program."""
    memory_bytes: int
    """Memory of the interpreter itself."""
    folder: str | None
    run: Callable[[Job, int], None]
    """What the program's process does, given the job and the descriptor to say that it is ready on. Does not return."""
    closes: tuple[int, ...] = ()
    """Descriptors that belong to the program's process, not to the monitor."""
    monitor: int = 0
    """The monitor's process id, once it runs."""


@dataclass(slots=True)
class _Reading:
    """What came out of the program so far."""

    output: dict[int, bytearray]
    status: int
    said: bytearray = field(default_factory=bytearray)

    def size(self) -> int:
        return sum(map(len, self.output.values()))


def watch(job: Job, report: socket.socket) -> None:
    """Run one program from start to end and send the report. The caller exits afterwards."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    job.monitor = os.getpid()
    stdout, stderr, status = os.pipe(), os.pipe(), os.pipe()
    confine.enter_for_program(job.means)
    head = os.fork()
    if head == 0:
        report.close()
        os.dup2(stdout[1], 1)
        os.dup2(stderr[1], 2)
        for descriptor in (*stdout, *stderr, status[0]):
            os.close(descriptor)
        _start(job, status[1])
    for descriptor in (stdout[1], stderr[1], status[1], *job.closes):
        os.close(descriptor)
    reading = _Reading({stdout[0]: bytearray(), stderr[0]: bytearray()}, status[0])
    why, seconds = _follow(job, head, report, reading)
    _, wait_status, usage = os.wait4(head, 0)
    _drain(reading, job.limits.output_bytes)
    if why == "ended" and reading.size() > job.limits.output_bytes:
        why = "output"
    if job.folder is not None:
        _remove(job.folder)
    _report(job, report, reading, why, wait_status, seconds, usage.ru_utime + usage.ru_stime)


def _follow(job: Job, head: int, report: socket.socket, reading: _Reading) -> tuple[str, float]:
    """Read until the program has ended or must; kills it in the latter case. Why, and the seconds since it was ready."""
    process = os.pidfd_open(head)
    poll = select.poll()
    for descriptor in (*reading.output, reading.status, process, report.fileno()):
        poll.register(descriptor, select.POLLIN)
    began, ready = time.monotonic(), False
    watching = not job.means.namespaces
    while True:
        left = began + (job.limits.wall_s if ready else START_S) - time.monotonic()
        if left <= 0:
            return _kill(head, "timeout" if ready else "start"), time.monotonic() - began
        for descriptor, _ in poll.poll(1000 * (min(left, WATCH_S) if watching else left)):
            if descriptor == process:
                return "ended", time.monotonic() - began
            if descriptor == report.fileno():
                return _kill(head, "cancelled"), time.monotonic() - began
            data = os.read(descriptor, _PIPE_READ)
            if not data:
                poll.unregister(descriptor)
            elif descriptor == reading.status:
                reading.said += data
            else:
                reading.output[descriptor] += data
        if not ready and reading.said.startswith(READY):
            ready, began = True, time.monotonic()
        if reading.size() > job.limits.output_bytes:
            return _kill(head, "output"), time.monotonic() - began
        broken = _broken_limit(job, head) if watching and ready else None
        if broken:
            return _kill(head, broken), time.monotonic() - began


def _broken_limit(job: Job, head: int) -> str | None:
    """Where there is no namespace to count in: whether the one process is too big, or its folder."""
    if memory_of([head]) > job.limits.memory_bytes + job.memory_bytes:
        return "memory"
    return "files" if job.folder is not None and _holds_too_much(job.folder, job.limits) else None


def _holds_too_much(folder: str, limits: Limits) -> bool:
    """Whether a folder has more in it than allowed. It changes meanwhile, and can be deeper than a path can say."""
    found, size, left = 0, 0, [folder]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    found += 1
                    size += entry.stat(follow_symlinks=False).st_size
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    if found > limits.num_files + _OWN_FOLDERS or size > limits.file_bytes + _FOLDER_BYTES * found:
                        return True
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return True
    return False


def _kill(head: int, why: str) -> str:
    os.kill(head, signal.SIGKILL)
    return why


def _drain(reading: _Reading, limit: int) -> None:
    """Take what is still in the pipes. All writers are dead, so every read ends."""
    for descriptor, data in [*reading.output.items(), (reading.status, reading.said)]:
        os.set_blocking(descriptor, False)
        while reading.size() <= limit:
            try:
                part = os.read(descriptor, _PIPE_READ)
            except BlockingIOError:
                break
            if not part:
                break
            data += part


def _remove(folder: str) -> None:
    """Remove the folder of a program that is dead, however deep or locked. Links in it are removed, not followed."""
    for command in (["chmod", "-R", "u+rwX", folder], ["rm", "-rf", folder]):
        silence = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in (1, 2)]
        os.waitpid(os.posix_spawnp(command[0], command, dict(os.environ), file_actions=silence), 0)


def _report(
    job: Job, report: socket.socket, reading: _Reading, why: str, wait_status: int, seconds: float, cpu_s: float
) -> None:
    said = bytes(reading.said)
    head: dict[str, object] = {"why": why, "status": wait_status, "seconds": seconds, "cpu_s": cpu_s}
    if not said.startswith(READY):
        head["fault"] = said.decode(errors="replace") or f"the program's process got no further than its start ({why})"
    elif job.means.namespaces and why == "ended":
        message = said[len(READY) :]
        if len(message) == _ENDED.size:
            ended, head["status"], head["cpu_s"] = _ENDED.unpack(message)
            head["why"] = "memory" if ended == b"m" else "ended"
    stdout, stderr = (bytes(data) for data in reading.output.values())
    stdout = stdout[: job.limits.output_bytes]
    stderr = stderr[: job.limits.output_bytes - len(stdout)]
    head["sizes"] = [len(stdout), len(stderr)]
    report.settimeout(_REPORT_S)
    report.sendall(frames.pack(json.dumps(head).encode()) + stdout + stderr)


def _start(job: Job, status: int) -> None:
    """The first process. Ends the process, whatever happens."""
    try:
        if job.means.namespaces:
            _be_init(job, status)
        else:
            job.run(job, status)
    except BaseException as error:
        os.write(status, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(1)


def _be_init(job: Job, status: int) -> None:
    """Process 1: make the folder, start the program, collect the dead, watch memory, say how the program ended."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 only gets signals that it handles
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    uid = confine.uid_of(job.means, job.slot)
    limits = job.limits
    hide = not job.means.user_namespace  # in one, init and the program are the same user, and init could not see it either
    proc = folders.mount_box(size_bytes=limits.file_bytes, num_files=limits.num_files, uid=uid, hide_init=hide)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        job.run(job, status)
    kernel.drop_capabilities()
    kernel.close_all_but({status})
    monitor = select.poll()
    monitor.register(status, 0)
    while not monitor.poll(0):  # an error on the pipe: nobody reads it any more
        signal.sigtimedwait([signal.SIGCHLD], WATCH_S)
        while True:
            pid, wait_status, usage = os.wait4(-1, os.WNOHANG)
            if pid == program:
                os.write(status, _ENDED.pack(b"e", wait_status, usage.ru_utime + usage.ru_stime))
                os._exit(0)
            if pid == 0:
                break
        running = _all_but_init() if proc else []
        if memory_of(running) > limits.memory_bytes + job.memory_bytes * len(running):
            os.write(status, _ENDED.pack(b"m", 0, 0.0))
            os._exit(0)


def _all_but_init() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]  # noqa: PTH208


def memory_of(pids: list[int]) -> int:
    """Bytes of memory that processes hold by themselves or share without a file, shared ones counted for each."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
                lines = file.read().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))
    return total
