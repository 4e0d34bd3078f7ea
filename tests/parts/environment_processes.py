"""Servers of environments: on the event loop of another thread, or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts.patience import PATIENCE_S
from polyturn.environments.base import Environment
from polyturn.environments.calls import call
from polyturn.environments.remote import EnvironmentServer, RemoteEnvironment
from polyturn.processes.role import read_address, role_environment

TESTS = Path(__file__).parents[1]
TOKEN = "a token for tests"


@contextlib.contextmanager
def served(environment: Environment, **options: Any) -> Iterator[EnvironmentServer]:
    """A server on a loop of its own thread, its environment started; both are stopped at the end."""
    started, stop = threading.Event(), asyncio.Event()
    servers: list[EnvironmentServer] = []
    loops: list[asyncio.AbstractEventLoop] = []
    failed: list[BaseException] = []

    async def serve() -> None:
        await call(environment.start)
        server = EnvironmentServer(environment, token=TOKEN, **options)
        try:
            await server.start()
            servers.append(server)
            loops.append(asyncio.get_running_loop())
            started.set()
            await stop.wait()
        finally:
            await server.stop()
            await call(environment.stop)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="an environment server", daemon=True)
    thread.start()
    try:
        assert started.wait(PATIENCE_S), "the server did not start"
        if failed:
            raise failed[0]
        yield servers[0]
    finally:
        if loops:
            loops[0].call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not stop"
    if failed:
        raise failed[0]


def remote(local: Environment, *servers: EnvironmentServer, **options: Any) -> RemoteEnvironment:
    """`local`, played by `servers`."""
    return RemoteEnvironment(local, [server.url for server in servers], token=TOKEN, **options)


@contextlib.asynccontextmanager
async def connected(environment: RemoteEnvironment) -> Any:
    """Within it, `environment` is started."""
    try:
        await environment.start()
        yield environment
    finally:
        await environment.stop()


@dataclass(frozen=True)
class EnvironmentProcess:
    """A process that plays an environment as the role `name`."""

    name: str
    folder: Path
    popen: subprocess.Popen[str]

    @property
    def url(self) -> str:
        """Where it serves; waits until it does."""
        ends = time.monotonic() + PATIENCE_S
        while (url := read_address(self.folder, self.name)) is None:
            assert self.popen.poll() is None, f"{self.name} ended: {self.popen.communicate()[1]}"
            assert time.monotonic() < ends, f"{self.name} does not serve"
            time.sleep(0.01)
        return url


@contextlib.contextmanager
def processes(folder: Path, environment: str, *, loop_limits_s: Sequence[float] = (60.0,)) -> Iterator[list[Any]]:
    """A process for each limit, `environment-0` and on, each with its own `environment`. All of them end with the block."""
    for inner in ("heartbeats", "roles"):
        (folder / inner).mkdir(exist_ok=True)
    variables = {**os.environ, **role_environment(folder, {}, TOKEN), "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"}
    found = []
    try:
        for index, limit_s in enumerate(loop_limits_s):
            command = [sys.executable, "-m", "parts.environment_process", f"environment-{index}", environment, str(limit_s)]
            popen = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
            found.append(EnvironmentProcess(f"environment-{index}", folder, popen))
        yield found
    finally:
        for process in found:
            process.popen.kill()
            process.popen.communicate()


async def until(condition: Any, what: str) -> None:
    """Wait until `condition()` holds."""
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends, f"waited for {what}"
        await asyncio.sleep(0.01)
