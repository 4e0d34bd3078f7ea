"""Watches the event loop from a thread: when code that never awaits holds it, no deadline in it can pass any more.

An author's `async def step` that blocks (a `time.sleep`, an endless loop, a synchronous request) stops every trajectory and
every timer. The watchdog then says where the loop is stuck, and ends the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

EXIT_CODE = 3
LOOP_GRACE_S = 30.0
"""How much longer than a tool's deadline an event loop may stand still before its process is ended."""
_INNERMOST = 3


class LoopWatchdog:
    """`with LoopWatchdog(limit_s):` inside a coroutine. Calls `end` with a sentence when the loop stands still for `limit_s`.

    The default `end` prints the sentence and ends the process with exit code 3: the thread that is stuck can't be stopped
    in any other way.
    """

    def __init__(self, limit_s: float, *, end: Callable[[str], None] | None = None) -> None:
        self._limit_s = limit_s
        self._end = end or end_process
        self._stop = threading.Event()
        self._last_tick = 0.0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LoopWatchdog:
        loop, watched = asyncio.get_running_loop(), threading.get_ident()
        self._last_tick = time.monotonic()
        self._thread = threading.Thread(target=self._watch, args=(loop, watched), name="loop-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, watched: int) -> None:
        while not self._stop.wait(min(1.0, self._limit_s / 4)):
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(self._tick)
            if time.monotonic() - self._last_tick > self._limit_s:
                self._end(self._sentence(watched))
                return

    def _tick(self) -> None:
        self._last_tick = time.monotonic()

    def _sentence(self, watched: int) -> str:
        frame = sys._current_frames().get(watched)
        stack = traceback.extract_stack(frame)[-_INNERMOST:] if frame is not None else []
        where = " > ".join(f"{entry.name} ({entry.filename}:{entry.lineno})" for entry in stack) or "unknown code"
        return (
            f"the event loop has stood still for {self._limit_s:g} s in {where}; code in a coroutine must await, or be a plain "
            "function, which runs in a thread of its own"
        )


def end_process(sentence: str) -> None:
    """Print `sentence` as an error and end the process at once, exit code 3."""
    print(f"polyturn: error: {sentence}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)
