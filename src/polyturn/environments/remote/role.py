"""What the role `environment-N` of a run does, once its environment is built and started."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from polyturn.environments.base import Environment
from polyturn.environments.remote.server import EnvironmentServer
from polyturn.errors import ConfigError
from polyturn.processes.heartbeat import Heartbeat
from polyturn.processes.role import Role
from polyturn.processes.watchdog import LoopWatchdog

NOTED_EVERY_S = 0.5


async def serve_environment(
    role: Role, environment: Environment, heartbeat: Heartbeat, *, loop_limit_s: float, close_deadline_s: float = 5.0
) -> NoReturn:
    """Serve `environment`, which is started, announce the address, and go on until cancelled; then close what is left.

    `heartbeat` is the role's, and shows what is played. A coroutine of the author's that holds the event loop for
    `loop_limit_s` ends the process with exit code 3 and a sentence, as in a driver.

    Raises:
        ResourceError: no port can be had.
        ConfigError: the role has no token.
    """
    if role.token is None:
        raise ConfigError(f"{role.name} was started without the run's token; start it by `polyturn train` or `polyturn launch`")
    server = EnvironmentServer(
        environment,
        token=role.token,
        name=role.name,
        waiting=heartbeat.waiting,
        close_deadline_s=close_deadline_s,
    )
    with LoopWatchdog(loop_limit_s):
        await server.start()
        try:
            role.announce(server.url)
            while True:
                with heartbeat.waiting(f"requests, {server.num_open} trajectories open"):
                    await asyncio.sleep(NOTED_EVERY_S)
        finally:
            await server.stop()
