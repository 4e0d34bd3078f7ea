"""The end of a process that may have daemon threads in native code."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process with `code`, without taking the interpreter apart first.

    A daemon thread that comes back meanwhile, out of native code, is ended by Python in the middle of it, and C++ aborts the
    process for that: one that has done all of its work would count as killed. What is registered for the end is done as ever,
    unless calls or tasks are there that were given up on: it may wait for them.
    """
    threads = sys.modules.get("polyturn.processes.threads")  # imported by those who start some
    tasks = sys.modules.get("polyturn.processes.tasks")
    if not ((threads is not None and threads.still_running()) or (tasks is not None and tasks.left_behind())):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
