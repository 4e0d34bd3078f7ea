"""The process that programs are forked from: clean, started by exec, with common modules loaded, and never near a secret.

It hears of a program only its limits and a few descriptors. Source and tests go through one of these, from the driver straight
to the process that needs them, so that no memory which a program inherits ever held somebody's tests.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyturn.sandbox import child, confine, folders, frames, kernel, monitor
from polyturn.sandbox.base import Limits
from polyturn.sandbox.confine import Means

PRELOADED = """
    abc base64 bisect collections collections.abc copy dataclasses datetime decimal enum fractions functools hashlib heapq io
    itertools json linecache math operator os random re string statistics struct sys textwrap threading time traceback types
    typing
""".split()

_MOST_MESSAGE = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class _State:
    """What the loop keeps: who runs in which slot, and the numbers every program needs."""

    means: Means
    scratch: str
    readable: list[str]
    address_space_bytes: int
    memory_bytes: int
    slots: dict[int, int] = field(default_factory=dict)

    def free_slot(self) -> int:
        used = set(self.slots.values())
        return next(slot for slot in range(len(used) + 1) if slot not in used)


def main(control: socket.socket, settings: dict[str, Any]) -> None:
    """Make ready, say what was found, then start programs until the driver is gone."""
    for name in PRELOADED:
        importlib.import_module(name)
    sys.path[:] = [*folders.import_path(), *settings["import_paths"]]
    sys.executable = folders.interpreter()
    os.umask(0o022)
    kernel.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    readable = folders.readable(tuple(settings["import_paths"]))
    address_space, memory = _address_space(), monitor.memory_of([os.getpid()])
    means = confine.enter(settings["mode"], readable)
    state = _State(means, settings["scratch"], readable, address_space, memory)
    control.sendall(json.dumps(means.as_dict()).encode())
    gc.collect()
    gc.freeze()
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == wake:
                os.read(wake, 4096)
            elif not _accept(state, control, {wake, wake_write}):
                _end(state)
                return
        _collect(state)


def _accept(state: _State, control: socket.socket, own: set[int]) -> bool:
    """Start the program that a message asks for. False when the driver is gone."""
    data, descriptors, _, _ = socket.recv_fds(control, _MOST_MESSAGE, 4)
    if not data:
        return False
    order = json.loads(data)
    report = socket.socket(fileno=descriptors[0])
    try:
        slot = state.free_slot()
        pid = os.fork()
        if pid == 0:
            for descriptor in own | {control.detach()}:
                os.close(descriptor)
            _run_monitor(state, order, report, descriptors[1:], slot)
        state.slots[pid] = slot
    except OSError as error:
        _complain(report, f"no process could be started: {error}")
    finally:
        report.close()
        for descriptor in descriptors[1:]:
            os.close(descriptor)
    return True


def _run_monitor(state: _State, order: dict[str, Any], report: socket.socket, given: list[int], slot: int) -> None:
    """The monitor's whole life. Does not return."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        task = child.Errand(role=order["role"], given=tuple(given), readable=state.readable)
        job = monitor.Job(
            slot=slot,
            limits=Limits(**order["limits"]),
            means=state.means,
            address_space_bytes=state.address_space_bytes,
            memory_bytes=state.memory_bytes,
            folder=None if state.means.namespaces else _make_folder(state, slot, order["id"]),
            run=task.run,
            closes=tuple(given),
        )
        monitor.watch(job, report)
    except BaseException as error:
        _complain(report, f"the monitor failed: {type(error).__name__}: {error}")
    finally:
        os._exit(0)


def _make_folder(state: _State, slot: int, number: int) -> str:
    """A folder on disk, where none can be mounted; whoever made `scratch` removes it."""
    folder = Path(state.scratch) / str(number)
    folder.mkdir(mode=0o700)
    uid = confine.uid_of(state.means, slot)
    if uid != os.getuid():
        os.chown(folder, uid, uid)
    return str(folder)


def _complain(report: socket.socket, text: str) -> None:
    try:
        report.settimeout(10)
        report.sendall(frames.pack(json.dumps({"fault": text, "sizes": [0, 0]}).encode()))
    except OSError:
        pass


def _collect(state: _State) -> None:
    """Reap whoever has ended, and free the slots."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        state.slots.pop(pid, None)


def _end(state: _State) -> None:
    """End all monitors, and with them their programs, and wait until none is left."""
    for pid in state.slots:
        os.kill(pid, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _address_space() -> int:
    """Bytes of address space that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
