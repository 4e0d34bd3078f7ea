"""One view of all log files: `all.log`, and the terminal.

Every role writes to a file of its own. A thread follows all of them, so that neither a slow terminal nor a slow disk keeps
the supervisor from noticing that somebody died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from polyturn.launch.losses import ERROR

ALL = "all.log"

_LOOK_S = 0.1
_READ_BYTES = 1 << 20
_MOST_BEHIND_BYTES = 8 << 20
_LONGEST_BYTES = 1 << 16
_MOST_WAITING = 10_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a role's log, without its end."""

    role: str
    text: str


class Follower:
    """Reads what is new in one file, line by line: whatever bytes there are, however long the lines, however fast it grows."""

    def __init__(self, role: str, path: Path) -> None:
        self._role = role
        self._path = path
        self._place = 0
        self._rest = b""

    def read(self, *, last: bool = False) -> list[Line]:
        """The lines that were completed since the last call; with `last` all that is there, complete or not."""
        lines: list[Line] = []
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size - self._place > _MOST_BEHIND_BYTES:
                    skipped = size - _READ_BYTES - self._place
                    lines += self._take(b"\n" if self._rest else b"")
                    lines.append(Line(self._role, f"({skipped} bytes came too fast for this view; they are in {self._path})"))
                    self._place += skipped
                file.seek(self._place)
                while data := file.read(_READ_BYTES):
                    self._place += len(data)
                    lines += self._take(data)
                    if not last:
                        break
        except OSError:
            pass  # not there yet, or no longer
        return lines + (self._take(b"\n") if last and self._rest else [])

    def _take(self, data: bytes) -> list[Line]:
        *complete, self._rest = (self._rest + data).split(b"\n")
        pieces = [piece for line in complete for piece in _cut(line)]
        if len(self._rest) > _LONGEST_BYTES:
            *more, self._rest = _cut(self._rest)
            pieces += more
        return [Line(self._role, _text(piece)) for piece in pieces]


class LogView:
    """Follows the logs of `roles` in the folder `logs` from `start` to `stop`, in threads of its own.

    Every line goes to `all.log` with time and role. The lines of `main` go to stdout as they are, so that they look as they do
    when it runs alone; those of all others, and its errors, go to stderr, as `engine-0 | text`.
    """

    def __init__(self, logs: Path, roles: Iterable[str], *, main: str, out: int = 1, err: int = 2) -> None:
        self._followers = [Follower(role, logs / f"{role}.log") for role in roles]
        self._all = logs / ALL
        self._main = main
        self._terminal = _Terminal(out, err)
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log view", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._terminal.start()
        self._thread.start()

    def note(self, text: str) -> None:
        """Have a line of the supervisor's own shown and kept in `all.log`."""
        self._notes.put(text)

    def stop(self, within_s: float) -> None:
        """Show what is left and end. A terminal that takes nothing any more is given up on after `within_s`."""
        end = time.monotonic() + within_s
        self._ending.set()
        self._thread.join(within_s)
        self._terminal.stop(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        try:
            with self._all.open("a", encoding="utf-8", errors="replace", buffering=1) as file:
                self._follow(file.write)
        except OSError as error:
            _log.warning("%s can't be written (%s); the run goes on without it", self._all, error.strerror)
            self._follow(lambda text: None)

    def _follow(self, keep: Callable[[str], object]) -> None:
        last = False
        while not last:
            last = self._ending.wait(_LOOK_S)
            lines = [line for follower in self._followers for line in follower.read(last=last)]
            with contextlib.suppress(queue.Empty):
                while True:
                    lines.append(Line("launch", self._notes.get_nowait()))
            if lines:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                keep("".join(f"{stamp} {line.role} | {line.text}\n" for line in lines))
                for line in lines:
                    self._show(line)

    def _show(self, line: Line) -> None:
        if line.role == self._main and not line.text.startswith(ERROR):
            self._terminal.put(line.text, error=False)
        elif line.role == "launch":
            self._terminal.put(line.text, error=True)
        else:
            self._terminal.put(f"{line.role} | {line.text}", error=True)


class _Terminal:
    """Writes from a thread of its own. When its reader is slow, lines are left out and counted; when it left, all are.

    Descriptors rather than streams: a thread that is stuck in a stream holds its lock, and Python can't end then.
    """

    def __init__(self, out: int, err: int) -> None:
        self._descriptors = (out, err)
        self._gone = [False, False]
        self._waiting: queue.Queue[tuple[str, bool] | None] = queue.Queue(_MOST_WAITING)
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="log terminal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, text: str, *, error: bool) -> None:
        try:
            if self._left_out:
                self._waiting.put_nowait((f"({self._left_out} lines came too fast to be shown here; they are in {ALL})", True))
                self._left_out = 0
            self._waiting.put_nowait((text, error))
        except queue.Full:
            self._left_out += 1

    def stop(self, within_s: float) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=within_s)
            self._thread.join(within_s)

    def _run(self) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        while (item := self._waiting.get()) is not None:
            text, error = item
            data = f"{text}\n".encode(encoding, errors="replace")
            try:
                while data and not self._gone[error]:
                    data = data[os.write(self._descriptors[error], data) :]
            except OSError:  # its reader has left, which is no reason to stop a run
                self._gone[error] = True


def _cut(line: bytes) -> list[bytes]:
    """A line in pieces of bounded length; one that is short enough, or empty, as it is."""
    if len(line) <= _LONGEST_BYTES:
        return [line]
    return [line[start : start + _LONGEST_BYTES] for start in range(0, len(line), _LONGEST_BYTES)]


def _text(line: bytes) -> str:
    """A line as text. Of one that was written over and over, as progress bars are, the last state."""
    return line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
