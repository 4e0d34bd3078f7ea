"""The `hf_server` engine's server: an `HfEngine` behind the HTTP routes that a vLLM server has, on loopback by default.

Paths, bodies and answers are those of vLLM 0.32.0 (`/v1/models`, `/inference/v1/generate`, and its routes for pausing and
weight updates), so that one client serves both; `/polyturn/weights` is ours. Where it differs: every route but `/health`
needs the bearer token, every refusal has the form `{"error": {"message", "type", "code"}}`, an aborted completion has no
tokens, and log-probabilities are of the sampled tokens only, under the temperature asked for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast, get_args

from aiohttp import web

from polyturn.engine.hf import AbortedError, HfEngine, PauseMode
from polyturn.engine.weight_routes import WeightRoutes
from polyturn.engine.wire import GENERATE, answer_body, read_request
from polyturn.errors import ConfigError, EngineError, PolyturnError
from polyturn.processes.http_words import bears_token, is_loopback
from polyturn.weight_sync.labels import DEFAULT_LABEL, WEIGHTS_ROUTE

MOST_BYTES = 64 << 20
"""Of a request's body."""
STOP_S = 5.0
"""How long answers under way have when the server stops."""
LINGER_S = 0.004
"""`HfEngine.linger_s` for a served engine: over HTTP, requests that are made together don't arrive together."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)


class EngineServer:
    """Serves `engine`, which it starts and stops, at `host` and `port`; port 0 takes a free one, and `url` says which.

    With a `token`, requests must bring it. A client that leaves cancels its request. `model` is the name it gives itself.
    """

    def __init__(
        self,
        engine: HfEngine,
        *,
        token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = "policy",
    ) -> None:
        if token is None and not is_loopback(host):
            raise ConfigError(f"an engine server at engine.host={host} can be reached from outside; it needs a token")
        self._engine = engine
        self._weights = WeightRoutes(engine)
        self._token = token
        self._host = host
        self._port = port
        self._model = model
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Start the engine and listen. Raises ConfigError when the port is taken."""
        await self._engine.start()
        runner = web.AppRunner(self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            await self._engine.stop()
            where = f"{self._host}:{self._port}"
            raise ConfigError(
                f"an engine server can't listen on {where} ({error.strerror}); give another engine.port, or null"
            ) from error
        self._port = runner.addresses[0][1]
        self._runner = runner

    async def stop(self) -> None:
        """Fail what waits, stop listening, leave the trainer's group. Safe to call twice."""
        await self._engine.stop()
        await self._weights.leave()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _application(self) -> web.Application:
        weights = self._weights
        app = web.Application(middlewares=[self._guard], client_max_size=MOST_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post(GENERATE, self._generate),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/init_weight_transfer_engine", _route(weights.init)),
                web.post("/shutdown_weight_transfer_engine", _route(weights.shutdown)),
                web.post("/start_weight_update", _route(weights.start)),
                web.post("/update_weights", _route(weights.update)),
                web.post("/finish_weight_update", _route(weights.finish)),
                web.get("/weight_info", _route(weights.info)),
                web.get("/get_world_size", self._world_size),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get(WEIGHTS_ROUTE, self._describe),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The token, and every error as an answer."""
        if request.path != "/health" and not bears_token(request.headers.get("Authorization"), self._token):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except ValueError as error:
            return _refusal(400, error)
        except web.HTTPException as error:
            return _refusal(error.status, error, error.reason)
        except PolyturnError as error:
            return _refusal(503 if self._engine.failure is not None else 500, error)
        except Exception as error:
            _log.warning("%s %s failed", request.method, request.path, exc_info=True)
            return _refusal(500, error, f"{type(error).__name__}: {error}")

    async def _health(self, request: web.Request) -> web.Response:
        failure = self._engine.failure
        return web.Response() if failure is None else _refusal(503, EngineError(failure))

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "polyturn",
            "max_model_len": self._engine.context_limit,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _generate(self, request: web.Request) -> web.Response:
        engine = self._engine
        asked, sampling = read_request(await _json(request), context_limit=engine.context_limit, vocab_size=engine.vocab_size)
        try:
            completion = await engine.generate(tuple(asked.token_ids), sampling)
        except AbortedError:
            completion = None
        label = {0: DEFAULT_LABEL} if self._weights.label == DEFAULT_LABEL else {}
        return web.json_response(answer_body(asked, completion, model=self._model, label=label))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={mode!r} is none; there are keep, wait and abort")
        await self._engine.pause(cast(PauseMode, mode))
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._engine.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._engine.paused})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        # The hf engine keeps no keys and values from one batch to the next.
        return web.json_response({"success": True})

    async def _describe(self, request: web.Request) -> web.Response:
        checksums = request.query.get("checksums", "false") == "true"
        return web.json_response(await self._weights.describe({}, checksums=checksums))


async def serve_engine(server: EngineServer, announce: Callable[[str], None]) -> None:
    """Run `server` until cancelled; `announce` hears its URL once it answers."""
    await server.start()
    try:
        announce(server.url)
        await asyncio.Event().wait()
    finally:
        await server.stop()


def _route(method: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await _json(request) if request.can_read_body else {}
        if not isinstance(body, dict):
            raise ValueError("the body must be an object")
        return web.json_response(await method(body))

    return handler


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is no JSON: {error}") from error


def _refusal(status: int, error: Exception, message: str | None = None) -> web.Response:
    words = {"message": message or str(error), "type": type(error).__name__, "param": None, "code": status}
    return web.json_response({"error": words}, status=status)
