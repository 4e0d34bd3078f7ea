"""The driver's end of the connection to one environment process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any, Literal

import aiohttp

from polyturn.environments.remote import wire
from polyturn.environments.remote.faults import to_error
from polyturn.environments.remote.outbox import Outbox
from polyturn.environments.remote.wire import MOST_BYTES, PATH, PROTOCOL
from polyturn.errors import ConfigError, DeadlineError, ResourceError
from polyturn.processes.deadlines import deadline

TICKS = 4
"""How often in `silence_s` a process is asked whether it is there."""
CLOSE_S = 2.0
"""How long the end of a connection may take."""

_log = logging.getLogger(__name__)


class Link:
    """One connection to the process at `url`, shared by its trajectories. `num_open` counts them, for whoever places them.

    A process that says nothing for `silence_s`, although it is asked, is given up. From then on, as after any other end of the
    connection, `lost` has the sentence and every `ask` raises it, those that wait included.
    """

    def __init__(self, url: str, token: str, silence_s: float) -> None:
        self.name = f"the environment process at {url}"
        self.num_open = 0
        self.lost: str | None = None
        self._url = url
        self._token = token
        self._silence_s = silence_s
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox = Outbox()
        self._heard = False
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._life: asyncio.Task[None] | None = None

    async def connect(self, session: aiohttp.ClientSession, environment: str) -> None:
        """Connect, and see that `environment` is what is played there.

        Raises:
            ResourceError: nobody answers there, or somebody else.
            ConfigError: another token, another environment.
        """
        try:
            self._socket = await session.ws_connect(
                self._url.rstrip("/") + PATH,
                headers={"Authorization": f"Bearer {self._token}"},
                max_msg_size=MOST_BYTES + 1,
                compress=0,
            )
            hello = wire.unpack(_frame(await self._socket.receive()))
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise ConfigError(f"{self.name} refused the token; give the one it was started with") from error
            raise ResourceError(f"{self.name} can't be reached: it answered with status {error.status}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ResourceError(f"{self.name} can't be reached: {error or type(error).__name__}") from error
        if hello.get("protocol") != PROTOCOL or not isinstance(hello.get("name"), str):
            raise ResourceError(f"{self.name} speaks another protocol; run the same version of Polyturn there")
        self.name = hello["name"]
        if hello.get("environment") != environment:
            raise ConfigError(f"{self.name} plays {hello.get('environment')!r}, and the recipe {environment!r}; start it anew")
        self._life = asyncio.create_task(self._live(self._socket), name=f"connection to {self.name}")

    async def disconnect(self) -> None:
        """End the connection, which closes the trajectories that are still open there."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait({self._life}, timeout=2 * CLOSE_S)
        self._lose("the driver has ended the connection")
        await self._hang_up()

    async def ask(self, op: Literal["setup", "step", "rewards", "close"], what: str, **fields: Any) -> Any:
        """The value of a request; `what` names it in a sentence. Cancelled, it is cancelled in the process too.

        Raises:
            ResourceError: the process is gone.
            EnvironmentSetupError: the request is too large.
        And what the environment raised there.
        """
        if self.lost is not None:
            raise ResourceError(self.lost)
        number = next(self._ids)
        frame = wire.pack({"id": number, "op": op, **fields}, what)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._outbox.put(number, frame)
        try:
            return await answer
        except asyncio.CancelledError:
            # A frame that has not left yet needs no cancelling; whatever has left may have opened something there.
            if not self._outbox.withdraw(number) and self.lost is None:
                self._outbox.put(number, wire.pack({"id": number, "op": "cancel"}, "a cancellation"))
            raise
        finally:
            del self._waiting[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, also when a cancellation came first

    async def _live(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Send, receive and watch until the connection ends, however it does."""
        work = (self._read(socket), self._outbox.send_all(socket.send_bytes), self._watch())
        tasks = [asyncio.create_task(part, name=f"connection to {self.name}") for part in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._lose(_reason(next(task for task in tasks if task in done)))  # the reader first: it was told why
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._hang_up()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            document = wire.unpack(_frame(await socket.receive()))
            self._heard = True
            number = document.get("id")
            answer = self._waiting.get(number) if isinstance(number, int) else None
            if answer is None or answer.done():
                continue  # a ping's, or of a request that was given up
            if "error" in document:
                answer.set_exception(to_error(document["error"], self.name))
            else:
                answer.set_result(document.get("value"))

    async def _watch(self) -> None:
        """Raise ResourceError once nothing was heard for some ticks: time in which our own loop stood still counts as one."""
        missed = 0
        while missed < TICKS:
            number = next(self._ids)
            self._heard = False
            self._outbox.put(number, wire.pack({"id": number, "op": "ping"}, "a ping"))
            await asyncio.sleep(self._silence_s / TICKS)
            self._outbox.withdraw(number)
            missed = 0 if self._heard else missed + 1
        raise ResourceError(f"it has said nothing for {self._silence_s:g} s, so it is stopped or its event loop stands still")

    def _lose(self, why: str) -> None:
        """Fail everybody who waits, and whoever comes after."""
        if self.lost is not None:
            return
        self.lost = f"{self.name} at {self._url} is gone: {why}"
        if self.num_open:
            _log.warning("%s; trajectories that were open there: %d", self.lost, self.num_open)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ResourceError(self.lost))

    async def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(DeadlineError, aiohttp.ClientError, OSError):
                async with deadline(CLOSE_S, f"{self.name} to hang up"):
                    await self._socket.close()


def _reason(ended: asyncio.Task[None]) -> str:
    """Why a connection is over, given the part of it that ended first."""
    error = ended.exception()
    if isinstance(error, ResourceError):
        return str(error)
    if not isinstance(error, aiohttp.ClientError | OSError):
        _log.error("the connection to an environment process failed", exc_info=error)
    return f"the connection broke: {error or type(error).__name__}"


def _frame(message: aiohttp.WSMessage) -> bytes:
    """The bytes of a message. Raises ResourceError for the end of the connection."""
    if message.type is aiohttp.WSMsgType.BINARY:
        data: bytes = message.data
        return data
    if message.type is aiohttp.WSMsgType.CLOSE and message.extra:
        raise ResourceError(str(message.extra))
    if message.type is aiohttp.WSMsgType.ERROR:
        raise ResourceError(f"the connection broke: {message.data}")
    raise ResourceError("the connection was closed")
