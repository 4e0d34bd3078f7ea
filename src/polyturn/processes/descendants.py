"""All that descends from this process, as /proc tells it, and its end.

A process that has made itself a subreaper (`parents.become_subreaper`) loses nobody: whoever leaves its own parent, in a
session of its own or not, is handed to it. Where there is no /proc the lists are empty, and process groups are all there is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

HAS_PROC = Path("/proc/self/stat").exists()
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """One process at the time of the look. `started` tells it from a later one with the same number."""

    pid: int
    parent: int
    state: str
    started: int

    @property
    def ended(self) -> bool:
        """Whether it is dead, and only its parent has not collected it yet."""
        return self.state in "ZX"


def process(pid: int) -> Process | None:
    """What /proc says of `pid`; None when there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return Process(pid=pid, parent=int(fields[1]), state=fields[0].decode(), started=int(fields[19]))


def all_pids() -> list[int]:
    """The numbers of all processes; empty where there is no /proc."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()] if HAS_PROC else []


def descendants() -> list[Process]:
    """Everybody below this process, the dead that nobody has collected included; parents before their children."""
    children: dict[int, list[Process]] = {}
    for pid in all_pids():
        if (found := process(pid)) is not None:
            children.setdefault(found.parent, []).append(found)
    family: list[Process] = list(children.get(os.getpid(), ()))
    for member in family:  # grows while it is walked
        family.extend(children.get(member.pid, ()))
    return family


def send(target: Process, number: int) -> None:
    """Send a signal to a process that was looked at before, and to no other that has its number by now."""
    try:
        descriptor = os.pidfd_open(target.pid)
    except (AttributeError, OSError):  # no such call here, or no such process
        descriptor = -1
    try:
        now = process(target.pid)
        if now is None or now.started != target.started:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if descriptor < 0:
                os.kill(target.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def end_descendants(*, grace_s: float, limit_s: float) -> list[int]:
    """Ask everybody below this process to end, kill after `grace_s` whoever is left, and collect them. Blocks.

    Goes on until nobody is left, those included who start meanwhile, or `limit_s` have passed; returns who is left then.
    """
    start = time.monotonic()
    asked: set[tuple[int, int]] = set()
    while True:
        collect_orphans(own=())
        left = [found for found in descendants() if not found.ended]
        waited = time.monotonic() - start
        if not left or waited > limit_s:
            return [found.pid for found in left]
        for found in left:
            if waited >= grace_s:
                send(found, signal.SIGKILL)
            elif (found.pid, found.started) not in asked:
                asked.add((found.pid, found.started))
                send(found, signal.SIGTERM)
        time.sleep(_LOOK_S)


def collect_orphans(own: Collection[int | None]) -> None:
    """Take note of dead children that this process did not start but was handed; those in `own` are left alone."""
    for found in descendants():
        if found.ended and found.parent == os.getpid() and found.pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(found.pid, os.WNOHANG)
