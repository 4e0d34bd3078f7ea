"""Asks `math_verify`, where it is installed, whether two expressions are equal: sqrt(16) and 4.

It is asked in a process of its own, because such a question can take for ever, or all the memory, and a thread that computes
can't be stopped. The process sets an alarm before each question and dies by it; the next question starts a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

import polyturn

_log = logging.getLogger(__name__)

WORKER_MODULE = "polyturn.environments.rewards.symbolic_worker"
MAX_LENGTH = 100
"""Longest expression that is asked about, in characters."""
START_DEADLINE_S = 60.0
"""Importing a computer algebra system takes seconds on a busy machine."""
DEADLINE_S = 2.0
"""One question."""
_MARGIN_S = 3.0
"""What the process may take beyond its own alarm before it is killed from here."""
_ALLOWED = re.compile(
    r"(?:\\(?:sqrt|[dt]?frac|cdot|times|div|left|right|pi)(?![A-Za-z])|(?<![A-Za-z])(?:sqrt|pi)(?![A-Za-z])|[\d\s.+\-*/^()\[\]{}$π√])+"
)
_POWER = re.compile(r"(?:\^|\*\*)[\s{(+-]*(\d*)")
_MAX_POWER_DIGITS = 3
_NEEDED = re.compile(r"\\|\^|sqrt|pi|[π√]")


def same_expression(given: str, expected: str) -> bool:
    """Whether `math_verify` calls two expressions equal. False where it is not installed, has no answer or takes too long.

    Only text made of numbers, operators, roots, powers and fractions is asked about, and no plain sum: `2 + 3` is work left
    undone, and whoever searches words for numbers would also find one in `5 or 6`.
    """
    texts = (given.strip(), expected.strip())
    if not all(map(_askable, texts)) or not any(map(_NEEDED.search, texts)):
        return False
    return _installed() and _ask(*texts)


def _askable(text: str) -> bool:
    """Whether `text` is an expression, and one that can be computed: no tower of powers."""
    if not (0 < len(text) <= MAX_LENGTH and _ALLOWED.fullmatch(text)):
        return False
    powers = _POWER.findall(text)
    return len(powers) <= 1 and all(0 < len(digits) <= _MAX_POWER_DIGITS for digits in powers)


@lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


@lru_cache(maxsize=4096)
def _ask(given: str, expected: str) -> bool:
    return bool(_WORKER.ask(given, expected))


class Worker:
    """One child process that answers questions, started when the first is asked. Safe to use from several threads.

    The child is ended at exit, and ends by itself when its input closes, so that none outlives this process.
    """

    def __init__(
        self, module: str = "polyturn.environments.rewards.symbolic_worker", *, deadline_s: float = DEADLINE_S
    ) -> None:
        self._module = module
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._given_up = False
        atexit.register(self.close)

    def ask(self, given: str, expected: str) -> bool | None:
        """The child's verdict, None when it has none or died over the question."""
        with self._lock:
            if self._given_up or not self._started():
                return None
            verdict = self._exchange(json.dumps([given, expected]), self._deadline_s + _MARGIN_S)
            if verdict is None:
                self.close()
                return None
            return bool(json.loads(verdict))

    def _started(self) -> bool:
        if self._process is not None and self._process.poll() is None:
            return True
        self.close()
        here = str(Path(polyturn.__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(self._deadline_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))},
        )
        if self._exchange(None, START_DEADLINE_S) is not None:
            return True
        self.close()
        self._given_up = True
        _log.warning("math_verify is installed but could not be started; answers are compared as plain numbers only")
        return False

    def _exchange(self, question: str | None, deadline_s: float) -> str | None:
        """Send a line (if any) and wait for one; None when the child is gone or too slow."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            if question is not None:
                process.stdin.write(question + "\n")
                process.stdin.flush()
            if not select.select([process.stdout], [], [], deadline_s)[0]:
                return None
            return process.stdout.readline() or None
        except OSError:
            return None

    def close(self) -> None:
        """End the child; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):  # what could not be written any more
                process.communicate()


_WORKER = Worker()
