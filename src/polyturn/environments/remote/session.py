"""One driver's connection to an environment process, from hello to the closing of the last state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine
from typing import Any

import aiohttp
from aiohttp import web

from polyturn.environments.base import Environment
from polyturn.environments.remote import wire
from polyturn.environments.remote.faults import from_error
from polyturn.environments.remote.outbox import Outbox
from polyturn.environments.remote.trajectories import Trajectories, Waiting
from polyturn.environments.remote.wire import MOST_OPEN, PROTOCOL, Document, Request
from polyturn.errors import DeadlineError, ResourceError
from polyturn.processes.deadlines import deadline
from polyturn.processes.tasks import TaskSet

GRACE_S = 5.0
"""How long requests may take to end once they are cancelled."""
HANDSHAKE_S = 2.0
"""How long a driver may take to answer the end of a connection."""

_log = logging.getLogger(__name__)


class Session:
    """Reads requests, plays each in a task of its own, and sends what comes of it. Its end closes the states that are left."""

    def __init__(
        self, socket: web.WebSocketResponse, environment: Environment, name: str, waiting: Waiting, close_deadline_s: float
    ) -> None:
        self.trajectories = Trajectories(environment, waiting)
        self._socket = socket
        self._environment = environment
        self._name = name
        self._close_deadline_s = close_deadline_s
        self._outbox = Outbox()
        self._running: dict[int, tuple[Request, asyncio.Task[None]]] = {}
        self._cancelled: set[int] = set()
        self._ending = False

    async def run(self) -> None:
        """Serve until the connection ends or `end` is called. Returns when every state is closed or given up on."""
        try:
            # ConnectionError: the driver is gone already. DeadlineError: an author's code goes on although it was cancelled,
            # which TaskSet has logged.
            with contextlib.suppress(ConnectionError, DeadlineError):
                async with TaskSet(f"the requests of a driver of {self._name}", grace_s=GRACE_S) as tasks:
                    try:
                        await self._socket.send_bytes(wire.pack(self._hello(), "hello"))
                        tasks.start(self._send(), "answers", background=True)
                        await self._read(tasks)
                    finally:
                        self._ending = True
                    await self._finish_closes()
        finally:
            await self.trajectories.close_all(self._close_deadline_s)

    async def end(self, code: int = aiohttp.WSCloseCode.GOING_AWAY, reason: str = "it stops") -> None:
        """Tell the driver why the connection ends, which ends `run`. A driver that doesn't listen is cut off."""
        message = reason.encode("ascii", "replace")[:120]
        with contextlib.suppress(ConnectionError, DeadlineError):
            async with deadline(HANDSHAKE_S, "a driver to hang up"):
                await self._socket.close(code=code, message=message)

    def _hello(self) -> Document:
        return {"name": self._name, "environment": self._environment.name, "protocol": PROTOCOL, "pid": os.getpid()}

    async def _read(self, tasks: TaskSet) -> None:
        async for message in self._socket:
            if message.type is aiohttp.WSMsgType.ERROR:
                return
            try:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    raise ResourceError("a frame breaks the protocol between driver and environment processes: it is no bytes")
                self._take(wire.to_request(wire.unpack(message.data)), tasks)
            except ResourceError as error:
                _log.warning("%s ends the connection of a driver: %s", self._name, error)
                await self.end(aiohttp.WSCloseCode.POLICY_VIOLATION, str(error))
                return

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionError):  # the reader notices too
            await self._outbox.send_all(self._socket.send_bytes)

    def _take(self, request: Request, tasks: TaskSet) -> None:
        if request.op == "cancel":
            self._cancel(request.id, tasks)
            return
        if request.id in self._running or request.id in self.trajectories:
            raise ResourceError(f"request {request.id} was asked twice")
        if len(self._running) + len(self._outbox) >= MOST_OPEN:
            raise ResourceError(f"{MOST_OPEN:,} requests are under way, which is the limit of a process")
        if request.op == "ping":
            self._outbox.put(request.id, wire.pack({"id": request.id, "value": None}, "ping"))
            return
        self._run(request, self._answer(request), tasks)

    def _run(self, request: Request, work: Coroutine[Any, Any, None], tasks: TaskSet) -> None:
        task = tasks.start(work, f"{request.op} {request.id}", background=True)
        self._running[request.id] = (request, task)
        task.add_done_callback(lambda task: self._forget(request.id, task))

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        if number in self._running and self._running[number][1] is task:
            del self._running[number]
            self._cancelled.discard(number)

    def _cancel(self, number: int, tasks: TaskSet) -> None:
        """Give up request `number`. A trajectory that it has opened is nobody's, and is closed."""
        self._outbox.withdraw(number)
        _, task = self._running.get(number, (None, None))
        if task is not None and not task.done():
            self._cancelled.add(number)
            task.cancel()
        elif number in self.trajectories:
            close = Request(id=number, op="close", handle=number)
            self._run(close, self._abandon(close), tasks)

    async def _answer(self, request: Request) -> None:
        """Play `request` and put its answer in the outbox. An exception of the environment is an answer."""
        try:
            value = await self.trajectories.perform(request)
            if request.op == "setup" and self._given_up(request.id):
                # It went on although it was cancelled.
                await self._abandon(Request(id=request.id, op="close", handle=request.id))
                return
            frame = wire.pack({"id": request.id, "value": value}, f"the answer of {self._environment.name}.{request.op}")
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            # As in a rollout: a cancellation is the driver's, or came out of a task inside the author's code.
            if isinstance(error, asyncio.CancelledError) and self._given_up(request.id):
                raise
            _log.info("%s.%s raised", self._environment.name, request.op, exc_info=True)
            frame = wire.pack({"id": request.id, "error": from_error(error)}, "an error")
        self._outbox.put(request.id, frame)

    async def _abandon(self, close: Request) -> None:
        """Close a trajectory that its driver never got to know."""
        try:
            await self.trajectories.perform(close)
        except (Exception, SystemExit) as error:
            _log.warning("the close of an abandoned trajectory raised %s: %s", type(error).__name__, error)

    def _given_up(self, number: int) -> bool:
        return self._ending or number in self._cancelled

    async def _finish_closes(self) -> None:
        """Cancel what is played, and let what is being closed come to its end."""
        closes: list[asyncio.Task[None]] = []
        for request, task in self._running.values():
            if request.op == "close":
                closes.append(task)
            else:
                task.cancel()
        if closes:
            await asyncio.wait(closes, timeout=self._close_deadline_s)
