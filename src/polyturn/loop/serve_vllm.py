"""The role of a vLLM server: stock vLLM as its child, until the run ends.

    role engine-N ── vLLM's API server ── its engine ── its workers, each with our extension

The role itself never imports vLLM. It takes one order, `POST /restart {"model": folder, "version": "3"}`, which is how the
`restart` bridge brings weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from polyturn.config.schema import Recipe
from polyturn.engine.vllm_arguments import refuse_arguments, server_arguments, server_environment
from polyturn.engine.vllm_install import find_vllm
from polyturn.engine.vllm_process import VllmProcess
from polyturn.errors import EngineError, PolyturnError
from polyturn.loop.check import check
from polyturn.loop.place import Place
from polyturn.loop.stopping import until_signal
from polyturn.processes.gpus import VISIBLE
from polyturn.processes.http_words import bears_token
from polyturn.processes.parents import become_subreaper
from polyturn.processes.starting import free_port
from polyturn.weight_sync.labels import DEFAULT_LABEL

MOST_RESTARTS = 3
"""How often a server that ended by itself is started anew, where others answer meanwhile."""
_STOP_S = 5.0
_LONGEST = 64
"""Of a folder for sockets: their paths may have 107 letters, and their names have up to 40."""


def serve_vllm_role(place: Place, recipe: Recipe) -> int:
    """Start vLLM and watch it until a signal comes. Returns the exit code.

    Raises UserError for what can't be started, EngineError when vLLM ends by itself and nobody else can answer.
    """
    recipe = check(recipe).recipe
    refuse_arguments(recipe, os.environ, on_gpu=bool(os.environ.get(VISIBLE)))
    # Workers that lose their parent stay this role's, and end with it.
    become_subreaper()
    asyncio.run(until_signal(_serve(place, recipe)))
    return 0


async def _serve(place: Place, recipe: Recipe) -> None:
    with _socket_folder() as sockets:
        await _serve_with(place, recipe, sockets)


@contextmanager
def _socket_folder() -> Iterator[Path]:
    """Where vLLM's processes meet: the folder of temporary files, or a shorter one where a socket's path would be too long."""
    usual = Path(tempfile.gettempdir())
    if len(str(usual)) <= _LONGEST:
        yield usual
        return
    with tempfile.TemporaryDirectory(prefix="polyturn-", dir="/tmp") as short:
        yield Path(short)


async def _serve_with(place: Place, recipe: Recipe, sockets: Path) -> None:
    role, engine = place.role, recipe.engine
    model = await _model(recipe)
    port = free_port(engine.host) if engine.port is None else engine.port + role.number
    vllm = _process(place, recipe, port, sockets)
    orders = Orders(vllm, token=role.token, host=engine.host)
    try:
        with place.waiting(f"vLLM to serve {recipe.model.path} (engine.start_deadline_s)", engine.start_deadline_s):
            await vllm.start(model, DEFAULT_LABEL)
        control = await orders.open()
        role.announce(vllm.url, control=control)
        print(f"vLLM serves {model} at {vllm.url}", flush=True)
        # Weights that are a rank's of the trainer too end with a server; nobody could go on.
        alone = engine.num_servers == 1 or recipe.weight_sync.mode == "single_copy"
        await _watch(vllm, orders, model, restarts=0 if alone else MOST_RESTARTS)
    finally:
        await orders.close()
        await vllm.stop()


def _process(place: Place, recipe: Recipe, port: int, sockets: Path) -> VllmProcess:
    """Not started yet. Raises UserError for a vLLM that is not there, or arguments that can't be."""
    install = find_vllm()
    on_gpu = bool(os.environ.get(VISIBLE))

    def environment(label: str) -> dict[str, str]:
        added = server_environment(recipe, os.environ, on_gpu=on_gpu, label=label)
        return {**os.environ, "VLLM_RPC_BASE_PATH": str(sockets), **added}

    command = partial(server_arguments, recipe, port=port, on_gpu=on_gpu, vllm=install)
    return VllmProcess(
        f"http://{recipe.engine.host}:{port}",
        command=command,
        environment=environment,
        log=place.role.folder / "logs" / f"{place.role.name}-vllm.log",
        start_deadline_s=recipe.engine.start_deadline_s,
    )


async def _model(recipe: Recipe) -> Path:
    """The folder of the model; one that comes with Polyturn is made when the cache doesn't hold it."""
    if recipe.model.path.startswith("builtin:"):
        from polyturn.loop.build import policy_folder, quiet_libraries  # bring torch, which only making a model needs

        quiet_libraries()
        return await policy_folder(recipe, check(recipe).environment, lambda text: print(text, flush=True), recipe.model.path)
    from polyturn.models.folder import model_folder

    return model_folder(recipe.model.path)


async def _watch(vllm: VllmProcess, orders: Orders, model: Path, *, restarts: int) -> None:
    """Wait for ever; a server that ends is started with the weights it began with, up to `restarts` times."""
    while True:
        try:
            await vllm.ended()
        except EngineError as error:
            async with orders.lock:
                if vllm.alive:
                    continue  # it was being restarted
                if restarts < 1:
                    raise
                restarts -= 1
                print(
                    f"{error}\npolyturn: it is started anew, and answers again once the next push brought its weights",
                    flush=True,
                )
                await vllm.stop()
                await vllm.start(model, DEFAULT_LABEL)


class Orders:
    """A small server beside vLLM's, on a free port, with the run's token."""

    def __init__(self, vllm: VllmProcess, *, token: str | None, host: str) -> None:
        self.lock = asyncio.Lock()
        self._vllm = vllm
        self._token = token
        self._host = host
        self._runner: web.AppRunner | None = None

    async def open(self) -> str:
        """Listen. Returns where."""
        app = web.Application(middlewares=[self._guard])
        app.add_routes([web.post("/restart", self._restart)])
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_STOP_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        return f"http://{self._host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stop listening. Safe to call twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not bears_token(request.headers.get("Authorization"), self._token):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except PolyturnError as error:
            return web.json_response({"error": {"message": str(error), "type": type(error).__name__}}, status=503)

    async def _restart(self, request: web.Request) -> web.Response:
        """End the server, and start it with other weights."""
        try:
            body: Any = json.loads(await request.read())
            model, version = Path(str(body["model"])), str(int(body["version"]))
        except (ValueError, LookupError, TypeError) as error:
            return web.json_response({"error": f"the body must have a model and a version: {error}"}, status=400)
        if not (model / "config.json").is_file():
            return web.json_response({"error": f"{model} holds no model"}, status=400)
        async with self.lock:
            await self._vllm.stop()
            await self._vllm.start(model, version)
        return web.json_response({"weight_version": version})
