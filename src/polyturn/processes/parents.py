"""Ties between a process and the one that started it, so that neither outlives the other by accident.

`die_with_parent` and `become_subreaper` are Linux's; elsewhere a thread looks after the first, and the second does nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PARENT = "POLYTURN_PARENT_PID"
"""Variable in which a starter leaves its process id, for `die_with_starter`."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_S = 1.0
_HANG_S = 30.0


def die_with_parent(number: int, parent: int, *, kill_after_s: float | None = None) -> None:
    """Have this process sent the signal `number` when its parent, of process id `parent`, ends, however it ends.

    Linux ties this to the *thread* of the parent that started this process: it must be one that lives as long as the
    parent, such as the main thread. A parent that is gone already counts as one that ends now. With `kill_after_s` this
    process is killed when it is still there so long after its parent.
    """
    told = _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
    if not told or kill_after_s is not None:
        arguments = (parent, None if told else number, kill_after_s)
        threading.Thread(target=_watch_parent, args=arguments, name="parent watch", daemon=True).start()


def die_with_starter() -> None:
    """`die_with_parent` for a role, with SIGTERM, where its starter left its process id in the environment."""
    parent = os.environ.get(PARENT)
    if parent:
        die_with_parent(signal.SIGTERM, int(parent), kill_after_s=_HANG_S)


def become_subreaper() -> bool:
    """Have orphans among this process's descendants handed to it, instead of to process 1. False where that can't be."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)


def _watch_parent(parent: int, number: int | None, kill_after_s: float | None) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    if number is not None:
        os.kill(os.getpid(), number)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(os.getpid(), signal.SIGKILL)
