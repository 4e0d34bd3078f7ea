"""Serves a store in shared memory over HTTP: put, get, list and delete files, each with its checksum.

    PUT    /v1/files/KEY     body: the file; X-Polyturn-XXH3: its checksum; If-None-Match: * only where there is none
    GET    /v1/files/KEY     the file, with its checksum; HEAD: whether it is there; DELETE: remove it
    GET    /v1/list?prefix=  {"files": [[key, bytes, time]]}
    POST   /v1/sweep         remove what broken uploads have left
    GET    /health           {"used_bytes", "capacity_bytes"}; needs no token

All else needs the bearer token. Files are bytes to it: nothing is ever unpickled or run.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket as sockets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web

from polyturn.errors import ConfigError, ResourceError, StorageError
from polyturn.processes.http_words import bears_token, is_loopback
from polyturn.processes.threads import in_thread
from polyturn.storage.checksums import hash_file, hasher
from polyturn.storage.stores.base import BadKeyError, MissingKeyError
from polyturn.storage.stores.local import LocalStore, draft_of
from polyturn.storage.stores.memory_tier import CHECKSUM

_CHUNK_BYTES = 1 << 20
_STOP_S = 5.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MemoryTierServer:
    """Keeps at most `capacity_bytes` of files under `root`, which are there again after a restart.

    `hyperpod` also serves the protocol of HyperPod's memory daemon, whose clients bring no token: whoever reaches the port may
    use that part. Raises ConfigError without a token.
    """

    def __init__(
        self,
        root: Path,
        *,
        token: str,
        capacity_bytes: int,
        host: str = "127.0.0.1",
        port: int = 0,
        hyperpod: bool = False,
    ) -> None:
        if not token:
            raise ConfigError("the memory tier has no token to ask requests for; set POLYTURN_MEMORY_TIER_TOKEN")
        self.store = LocalStore(root)
        self._token = token
        self._capacity_bytes = capacity_bytes
        self._host, self._port = host, port
        self._hyperpod = hyperpod
        self._reserved_bytes = 0
        self._checksums: dict[str, tuple[float, str]] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Where it serves, once started, without scheme."""

    async def start(self) -> None:
        """Serve. Raises ResourceError when the port can't be had."""
        self._runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=_STOP_S)
        await self._runner.setup()
        try:
            family = sockets.AF_INET6 if ":" in self._host else sockets.AF_INET
            listening = sockets.create_server((self._host, self._port), family=family, backlog=128)
            await web.SockSite(self._runner, listening).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ResourceError(f"the memory tier can't serve on {self._host}:{self._port}: {error.strerror}") from error
        self.url = f"{self._host}:{listening.getsockname()[1]}"

    async def stop(self) -> None:
        """Free the port. The files stay."""
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def is_open(self) -> bool:
        """Whether other machines reach it."""
        return not is_loopback(self._host)

    @contextlib.asynccontextmanager
    async def room_for(self, num_bytes: int) -> AsyncIterator[None]:
        """Set bytes aside for a file that is on its way. Answers 507 when there are not so many."""
        if num_bytes > self._capacity_bytes - self._used_bytes() - self._reserved_bytes:
            raise web.HTTPInsufficientStorage(
                text=f"the memory tier is full: {self._used_bytes():,} of {self._capacity_bytes:,} bytes are used; "
                "keep fewer checkpoints there, or start it with a larger --capacity-gib"
            )
        self._reserved_bytes += num_bytes
        try:
            yield
        finally:
            self._reserved_bytes -= num_bytes

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_put("/v1/files/{key:.+}", self._put)
        app.router.add_get("/v1/files/{key:.+}", self._get)
        app.router.add_delete("/v1/files/{key:.+}", self._delete)
        app.router.add_get("/v1/list", self._list)
        app.router.add_post("/v1/sweep", self._sweep)
        app.router.add_get("/health", self._health)
        if self._hyperpod:
            from polyturn.storage.memory_tier.hyperpod import add_routes

            add_routes(app, self)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        free = request.path == "/health" or (self._hyperpod and request.path.startswith("/v1/cp/"))
        if not free and not bears_token(request.headers.get("Authorization"), self._token):
            raise web.HTTPUnauthorized(text="the token is missing or wrong")
        try:
            return await handler(request)
        except MissingKeyError as error:
            raise web.HTTPNotFound(text=str(error)) from error
        except BadKeyError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        except StorageError as error:
            raise web.HTTPInternalServerError(text=str(error)) from error

    async def _put(self, request: web.Request) -> web.StreamResponse:
        key, absent = request.match_info["key"], request.headers.get("If-None-Match") == "*"
        target = self.store.path(key)
        scratch = self.store.root / ".incoming" / hashlib.sha256(key.encode()).hexdigest()[:16]
        async with self.room_for(request.content_length or 0):
            with draft_of(scratch) as draft:
                checksum = await receive(request, draft)
                if checksum != request.headers.get(CHECKSUM):
                    raise web.HTTPUnprocessableEntity(text=f"{key} did not arrive as it was sent")
                if absent:
                    stored = await in_thread(self.store.put_if_absent, draft.read_bytes(), key)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    await in_thread(lambda: self.store.put(draft, key, link=True))
                    stored = True
        if stored:
            self._checksums[key] = (target.stat().st_mtime, checksum)
        return web.json_response({"stored": stored})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        key = request.match_info["key"]
        path = self.store.path(key)
        if not self.store.exists(key):
            raise MissingKeyError(f"there is no file {key}")
        checksum = await self._checksum(key, path) if request.method == "GET" else ""
        return await send(request, path, {CHECKSUM: checksum})

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        self.store.delete(request.match_info["key"])
        self._checksums.pop(request.match_info["key"], None)
        return web.json_response({})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        entries = await in_thread(self.store.list, request.query.get("prefix", ""))
        return web.json_response({"files": [[entry.key, entry.num_bytes, entry.modified] for entry in entries]})

    async def _sweep(self, request: web.Request) -> web.StreamResponse:
        try:
            older_than_s = float(request.query["older_than_s"])
        except (KeyError, ValueError) as error:
            raise web.HTTPBadRequest(text="older_than_s must be a number of seconds") from error
        removed = self.store.sweep(request.query.get("prefix", ""), older_than_s) + self.store.sweep(".incoming/", older_than_s)
        return web.json_response({"removed": removed})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"used_bytes": self._used_bytes(), "capacity_bytes": self._capacity_bytes})

    async def _checksum(self, key: str, path: Path) -> str:
        """As it was received; of a file from before a restart, as it is."""
        known = self._checksums.get(key)
        modified = path.stat().st_mtime
        if known is None or known[0] != modified:
            known = modified, (await in_thread(hash_file, path))[1]
            self._checksums[key] = known
        return known[1]

    def _used_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.store.list(""))


async def receive(request: web.Request, draft: Path) -> str:
    """Write the body of a request into a file as it comes, and return its checksum."""
    found = hasher()
    with draft.open("wb", buffering=0) as file:
        async for piece in request.content.iter_chunked(_CHUNK_BYTES):
            found.update(piece)
            file.write(piece)
    return str(found.hexdigest())


async def send(request: web.Request, path: Path, headers: dict[str, str]) -> web.StreamResponse:
    """Answer with a file."""
    answer = web.StreamResponse(headers=headers)
    with path.open("rb", buffering=0) as file:
        answer.content_length = path.stat().st_size
        await answer.prepare(request)
        if request.method != "HEAD":
            while piece := file.read(_CHUNK_BYTES):
                await answer.write(piece)
    await answer.write_eof()
    return answer
