"""An environment behind a port: what a process that plays trajectories for a driver runs."""

from __future__ import annotations

import asyncio
import logging
import socket as sockets

from aiohttp import web

from polyturn.environments.base import Environment
from polyturn.environments.remote.session import GRACE_S, HANDSHAKE_S, Session
from polyturn.environments.remote.trajectories import Waiting, unnoted
from polyturn.environments.remote.wire import MOST_BYTES, PATH
from polyturn.errors import ConfigError, ResourceError
from polyturn.processes.http_words import bears_token

HOST = "127.0.0.1"

_log = logging.getLogger(__name__)


class EnvironmentServer:
    """Serves `environment`, which is started and stopped by whoever made it, on a free port of this machine.

    A request must bring `token`. `waiting` notes what is being played, as `Heartbeat.waiting` does. A driver whose connection
    ends has its trajectories closed, each within `close_deadline_s`.

    Raises ConfigError without a token.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        token: str,
        name: str = "environment-0",
        waiting: Waiting = unnoted,
        close_deadline_s: float = 5.0,
    ) -> None:
        if not token:
            raise ConfigError(f"{name} has no token to ask requests for; give the run's token")
        self._environment = environment
        self._token = token
        self._name = name
        self._waiting = waiting
        self._close_deadline_s = close_deadline_s
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._sessions: dict[Session, asyncio.Task[None]] = {}

    @property
    def url(self) -> str:
        """Where it serves, once started."""
        return self._url

    @property
    def num_open(self) -> int:
        """Trajectories that are open."""
        return sum(len(session.trajectories) for session in self._sessions)

    async def start(self) -> None:
        """Serve. Raises ResourceError when no port can be had."""
        application = web.Application()
        application.router.add_get(PATH, self._serve)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            listening = sockets.create_server((HOST, 0), backlog=128)
            await web.SockSite(self._runner, listening).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ResourceError(f"{self._name} can't serve on {HOST}: {error.strerror}") from error
        self._url = f"http://{HOST}:{listening.getsockname()[1]}"

    async def stop(self) -> None:
        """End every connection, close the states that are left, free the port. Takes a few deadlines at most."""
        if self._runner is None:
            return
        sessions, runner = dict(self._sessions), self._runner
        self._runner = None
        await asyncio.gather(*(session.end() for session in sessions))
        if sessions:
            # Each bounds its own end: the closes under way, the cancelled requests, the states that are left.
            limit_s = HANDSHAKE_S + GRACE_S + 2 * self._close_deadline_s + 1.0
            _, left = await asyncio.wait(sessions.values(), timeout=limit_s)
            for task in left:
                _log.warning("%s did not end within %g s, and is given up", task.get_name(), limit_s)
                task.cancel()
        await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if not bears_token(request.headers.get("Authorization"), self._token):
            return web.json_response({"error": "the token is missing or wrong"}, status=401)
        if self._runner is None:
            return web.json_response({"error": "it stops"}, status=503)
        socket = web.WebSocketResponse(timeout=HANDSHAKE_S, compress=False, max_msg_size=MOST_BYTES + 1)
        await socket.prepare(request)
        session = Session(socket, self._environment, self._name, self._waiting, self._close_deadline_s)
        # A task of its own, so that a request that aiohttp gives up on takes no state with it.
        task = asyncio.create_task(session.run(), name=f"a driver of {self._name}")
        self._sessions[session] = task
        try:
            await asyncio.shield(task)
        finally:
            del self._sessions[session]
        return socket
