"""The keeper: the process that stays when everything else of a run has ended, and ends what has not.

    keeper ── supervisor ── every other process of the run

A supervisor that is killed can't end what it has started. So `keep` forks: the parent becomes the keeper, which does nothing
but wait, hand on Ctrl-C and SIGTERM, and end at last whatever descends from it. When it is the keeper that is killed, the
supervisor gets a SIGTERM from the kernel, and ends the run in order.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

from polyturn.errors import ResourceError
from polyturn.processes.descendants import descendants, end_descendants
from polyturn.processes.endings import ending_words
from polyturn.processes.parents import become_subreaper, die_with_parent
from polyturn.processes.shared_memory import SharedMemory

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 3.0
_LIMIT_S = 30.0
_scratch: tuple[Path, int] | None = None


def keep() -> int | None:
    """Fork. Returns None in the child, which goes on as the supervisor; in the parent the exit code to end with.

    The parent returns when the child has ended and nothing that descends from it is left. A child that a signal killed,
    which was not handed on by the keeper, is ResourceError's exit code and a sentence. The child leads a session of its own,
    so that a Ctrl-C at the terminal reaches it once, through the keeper. Temporary files of the child and all that it
    starts go to a folder that is removed at the end. To be called before the process has threads.
    """
    if threading.active_count() > 1:
        raise RuntimeError("keep() forks, and a process with threads must not")
    segments = SharedMemory()
    become_subreaper()
    scratch = Path(tempfile.gettempdir(), f"polyturn-run-{secrets.token_hex(8)}")
    keeper = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that comes before the handlers are in place waits until they are.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        _go_on(keeper, scratch)
        return None
    return _Keeper(child, segments, scratch).run()


def remove_scratch() -> None:
    """In the child, as the last thing: remove the folder of temporary files, where no keeper is left to do it."""
    if _scratch is not None and os.getppid() != _scratch[1]:
        shutil.rmtree(_scratch[0], ignore_errors=True)


def _go_on(keeper: int, scratch: Path) -> None:
    """What makes the child a supervisor."""
    global _scratch
    _scratch = (scratch, keeper)
    os.setsid()
    become_subreaper()
    atexit.register(remove_scratch)
    scratch.mkdir(mode=0o700)
    scratch.chmod(0o711)  # a program in a sandbox, of another user, has its own folder below this one
    # What torch compiles is worth more than one run, so it is kept elsewhere.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"polyturn-compiled-{os.getuid()}")))
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    # A shell starts background commands with SIGINT ignored, and everybody would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _exit_in_order)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    die_with_parent(signal.SIGTERM, keeper)


def _exit_in_order(number: int, frame: FrameType | None) -> None:
    """What a request to end does until the supervisor has its own answer to it."""
    raise SystemExit(128 + number)


class _Keeper:
    """The parent's side."""

    def __init__(self, child: int, segments: SharedMemory, scratch: Path) -> None:
        self._child = child
        self._segments = segments
        self._scratch = scratch
        self._forwarded: set[int] = set()

    def run(self) -> int:
        before = {number: signal.getsignal(number) for number in _FORWARDED}
        for number in _FORWARDED:
            if number != signal.SIGHUP or before[number] != signal.SIG_IGN:  # nohup means it
                signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        _, status = os.waitpid(self._child, 0)
        code = os.waitstatus_to_exitcode(status)
        self._end_family()
        for number, handler in before.items():
            signal.signal(number, handler)
        if code >= 0:
            return code
        if -code in self._forwarded:
            return 128 - code
        print(
            f"polyturn: error: the supervisor of the run {ending_words(code)}; all that it had started has been ended",
            file=sys.stderr,
            flush=True,
        )
        return ResourceError.exit_code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Hand a signal on. The child's number is its own until `waitpid` has returned."""
        number = signal.SIGTERM if number == signal.SIGHUP else number
        self._forwarded.add(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _end_family(self) -> None:
        self._segments.look(lambda: [member.pid for member in descendants()])
        left = end_descendants(grace_s=_GRACE_S, limit_s=_LIMIT_S)
        if left:
            print(f"polyturn: error: these processes of the run could not be ended: {left}", file=sys.stderr, flush=True)
        self._segments.sweep()
        shutil.rmtree(self._scratch, ignore_errors=True)
