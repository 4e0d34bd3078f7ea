"""Roles as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen

from polyturn.errors import ResourceError
from polyturn.launch.specs import RoleSpec
from polyturn.processes.descendants import HAS_PROC
from polyturn.processes.parents import PARENT
from polyturn.processes.starting import start_process

_LOOK_S = 0.05


class LocalStarter:
    """Starts each role as a child of this process, its output in `logs`/NAME.log. Use it from the main thread."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def start(self, spec: RoleSpec, place: Mapping[str, str]) -> LocalRole:
        """Start a role. Raises ResourceError when the machine refuses."""
        environment = os.environ | dict(spec.environment) | dict(place) | {PARENT: str(os.getpid())}
        try:
            return LocalRole(start_process(spec.argv, environment, self._logs / f"{spec.name}.log"))
        except OSError as error:
            raise ResourceError(f"{spec.name} could not be started: {error}") from error


class LocalRole:
    """A child process that leads a process group of its own."""

    def __init__(self, process: Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, told by the kernel where that is possible, and asked for all the time elsewhere."""
        try:
            descriptor = os.pidfd_open(self._process.pid)
        except (AttributeError, OSError):  # not Linux, an old one, or forbidden; or it has been collected already
            while self._process.poll() is None:  # noqa: ASYNC110 - nobody could set an event
                await asyncio.sleep(_LOOK_S)
            return self._process.returncode
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the process, which knows best what to do about its children."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the whole group.

        Once its leader has been collected, a group's number may be another's. Where there is /proc, descendants are ended
        one by one later; elsewhere this is the only way to reach them.
        """
        if self._process.poll() is None or not HAS_PROC:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
