"""The near end of `gym_worker`: starts the process, asks it, and starts it again when it has died over a question."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polyturn
from polyturn.errors import EnvironmentSetupError, MissingDependencyError, ResourceError

MODULE = "polyturn.environments.adapters.gym_worker"
START_DEADLINE_S = 60.0
"""Importing the package takes seconds on a busy machine."""
MAKE_DEADLINE_S = 60.0
WALL_FACTOR = 4.0
"""Wall-clock seconds that one second of the worker's own computing may take."""


class GymProcess:
    """One worker for one data set. Safe to use from several threads, one question at a time.

    Raises MissingDependencyError where reasoning_gym is not installed.
    """

    def __init__(self, name: str, config: Mapping[str, Any], *, cpu_s: float) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise MissingDependencyError(
                f"reasoning_gym:{name} needs the package reasoning-gym; pip install 'polyturn[reasoning-gym]'"
            )
        self._name = name
        self._settings = json.dumps({"name": name, "config": dict(config), "cpu_s": cpu_s}, default=str)
        self._score_deadline_s = WALL_FACTOR * cpu_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        """Of the process, None where there is none."""
        return None if self._process is None else self._process.pid

    def open(self) -> None:
        """Start the process where it does not run.

        Raises:
            EnvironmentSetupError: the data set or its configuration is refused.
            ResourceError: the process does not start.
        """
        with self._lock:
            self._started()

    def ask(self, what: str, *arguments: Any) -> dict[str, Any]:
        """The worker's answer. Raises ResourceError when there is none, EnvironmentSetupError when the package raised."""
        said = self.ask_or_none(what, *arguments)
        if said is None:
            raise ResourceError(f"the process of reasoning_gym:{self._name} died or hung while asked to {what} {arguments}")
        return said

    def ask_or_none(self, what: str, *arguments: Any) -> dict[str, Any] | None:
        """The worker's answer, None when it died or hung over the question. Raises as `ask` does otherwise."""
        with self._lock:
            self._started()
            limit_s = self._score_deadline_s if what == "score" else MAKE_DEADLINE_S
            said = self._exchange({what: arguments}, limit_s)
            if said is None:
                self._end()
        if said is not None and "failed" in said:
            raise EnvironmentSetupError(f"reasoning_gym:{self._name} could not {what} {arguments}: {said['failed']}")
        return said

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _started(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        here = str(Path(polyturn.__file__).parents[1])
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, self._settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Some data sets go by the order of Python's sets: with the same hashes they make the same tasks everywhere.
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        )
        said = self._exchange(None, START_DEADLINE_S)
        if said is None or "refused" in said:
            self._end()
            if said is None:
                raise ResourceError(f"the process of reasoning_gym:{self._name} could not be started")
            raise EnvironmentSetupError(said["refused"])

    def _exchange(self, question: Mapping[str, Any] | None, limit_s: float) -> dict[str, Any] | None:
        """Send a line (if any) and wait for one; None when the process is gone or too slow."""
        process, end = self._process, time.monotonic() + limit_s
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            if question is not None:
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
            while b"\n" not in self._buffer:
                left_s = end - time.monotonic()
                if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                    return None
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return None
                self._buffer += chunk
            line, _, self._buffer = self._buffer.partition(b"\n")
            said = json.loads(line)
        except (OSError, ValueError):
            return None
        return said if isinstance(said, dict) else None

    def _end(self) -> None:
        process, self._process, self._buffer = self._process, None, b""
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):  # what could not be written any more
                process.communicate()
