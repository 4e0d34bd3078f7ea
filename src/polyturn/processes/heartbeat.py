"""What a process waits for right now, in a file that anyone can read while it waits.

    with Heartbeat(folder / "driver.json", "driver") as heartbeat:
        with heartbeat.waiting("12 trajectories of step 3", deadline_s=600):
            ...

A wait only notes itself in memory; a thread writes the file every `interval_s`. So waits may be short and many, and a file
that has grown old means that the whole process hangs.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from polyturn.processes.whole_file import write_whole

_MOST_WAITS = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait. `since` and `deadline` are Unix times in seconds; `deadline` is None for a wait bounded elsewhere."""

    what: str
    since: float
    deadline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a heartbeat file says. `written` is a Unix time in seconds.

    `waits` has the most urgent first and may be cut, `num_waits` counts all.
    """

    role: str
    pid: int
    host: str
    written: float
    num_waits: int
    waits: tuple[Wait, ...]


class Heartbeat:
    """Writes the waits of one role to `path`, as a context manager. Threads and asyncio tasks may share one object."""

    def __init__(self, path: str | Path, role: str, *, interval_s: float = 1.0) -> None:
        self._path = Path(path)
        self._role = role
        self._interval_s = interval_s
        self._waits: dict[object, Wait] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {role}", daemon=True)

    @contextmanager
    def waiting(self, what: str, deadline_s: float | None = None) -> Iterator[None]:
        """Note a wait for the length of the block. It bounds nothing: that is what `deadlines` is for."""
        now = time.time()
        token = object()
        with self._lock:
            self._waits[token] = Wait(what=what, since=now, deadline=None if deadline_s is None else now + deadline_s)
        try:
            yield
        finally:
            with self._lock:
                del self._waits[token]

    def __enter__(self) -> Heartbeat:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write once more and stop."""
        self._stopped.set()
        self._thread.join()
        self._write()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._write()

    def _write(self) -> None:
        """Replace the file. A disk that refuses is logged once and never ends a run."""
        with self._lock:
            waits = sorted(self._waits.values(), key=_urgency)
        beat = Beat(
            role=self._role,
            pid=os.getpid(),
            host=socket.gethostname(),
            written=time.time(),
            num_waits=len(waits),
            waits=tuple(waits[:_MOST_WAITS]),
        )
        try:
            write_whole(self._path, json.dumps(asdict(beat)))
        except OSError as error:
            if not self._complained:
                _log.warning("%s can't be written (%s); the run goes on without it", self._path, error.strerror)
            self._complained = True


def read_heartbeat(path: str | Path) -> Beat | None:
    """What the file says, None where there is none (yet)."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    waits = tuple(Wait(**wait) for wait in data.pop("waits"))
    return Beat(**data, waits=waits)


def _urgency(wait: Wait) -> tuple[bool, float, float]:
    """Sorts the next deadline first, waits without one last, older ones before younger ones."""
    return wait.deadline is None, wait.deadline or 0.0, wait.since
