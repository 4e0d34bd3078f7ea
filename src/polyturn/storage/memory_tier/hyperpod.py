"""The protocol of HyperPod's memory daemon, so that its clients find the same here on any cluster.

    GET POST DELETE /v1/cp/namespaces/NS                  POST: ?num_ranks=&steps_retained=
    GET POST DELETE /v1/cp/checkpoints/NS/RANK/STEP       the shard; Shard-Meta: {"checksum": base64 of xxh3_128, "algorithm"}
    GET             /v1/cp/checkpoints/NS/latest?limit=   the newest steps of which every rank's shard is here
    POST            /v1/cp/cluster/reset                  forget everything

A shard that does not fit its checksum is refused. Of the steps that are complete the newest `steps_retained` are kept.
"""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any

from aiohttp import web

from polyturn.errors import StorageError
from polyturn.processes.threads import in_thread
from polyturn.storage.stores.base import MissingKeyError
from polyturn.storage.stores.local import draft_of

if TYPE_CHECKING:
    from polyturn.storage.memory_tier.server import MemoryTierServer

_ROOT = "hyperpod"
_META = "Shard-Meta"
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,199}")


def add_routes(app: web.Application, server: MemoryTierServer) -> None:
    """Serve the protocol over the server's store."""
    daemon = HyperPodDaemon(server)
    for method, handler in (("GET", daemon.namespace), ("POST", daemon.make_namespace), ("DELETE", daemon.delete_namespace)):
        app.router.add_route(method, "/v1/cp/namespaces/{namespace}", handler)
    app.router.add_get("/v1/cp/checkpoints/{namespace}/latest", daemon.latest)
    for method, handler in (("GET", daemon.get), ("POST", daemon.put), ("DELETE", daemon.delete)):
        app.router.add_route(method, r"/v1/cp/checkpoints/{namespace}/{rank:\d+}/{step:\d+}", handler)
    app.router.add_post("/v1/cp/cluster/reset", daemon.reset)


class HyperPodDaemon:
    """Its handlers. Shards are `hyperpod/NS/STEP/RANK`, what was said of them `RANK.meta`, which is written second."""

    def __init__(self, server: MemoryTierServer) -> None:
        self._server = server
        self._store = server.store

    async def namespace(self, request: web.Request) -> web.StreamResponse:
        """What is known of a namespace."""
        return web.json_response(self._config(_namespace(request)))

    async def make_namespace(self, request: web.Request) -> web.StreamResponse:
        """Make one. The same again changes nothing; one of another size is refused, since its steps would never be complete."""
        namespace = _namespace(request)
        config = {"num_ranks": _number(request, "num_ranks"), "steps_retained": _number(request, "steps_retained")}
        if not self._store.put_if_absent(json.dumps(config).encode(), f"{_ROOT}/{namespace}/namespace.json"):
            known = self._config(namespace)
            if known["num_ranks"] != config["num_ranks"]:
                raise web.HTTPConflict(
                    text=f"the namespace {namespace} has {known['num_ranks']} ranks, not {config['num_ranks']}; delete it, "
                    "or take another name"
                )
        return web.json_response(self._config(namespace))

    async def delete_namespace(self, request: web.Request) -> web.StreamResponse:
        """Forget one, with all its shards."""
        self._forget(f"{_ROOT}/{_namespace(request)}/")
        return web.json_response({})

    async def latest(self, request: web.Request) -> web.StreamResponse:
        """Its complete steps, the newest first."""
        namespace = _namespace(request)
        steps = self._complete(namespace, self._config(namespace)["num_ranks"])
        return web.json_response(steps[: _number(request, "limit", 3)])

    async def put(self, request: web.Request) -> web.StreamResponse:
        """Take a shard."""
        from polyturn.storage.memory_tier.server import receive

        namespace, key = _namespace(request), _key(request)
        config = self._config(namespace)
        if int(request.match_info["rank"]) >= config["num_ranks"]:
            raise web.HTTPBadRequest(text=f"the namespace {namespace} has ranks 0 to {config['num_ranks'] - 1}")
        meta = request.headers.get(_META, "")
        expected = _checksum(meta)
        async with self._server.room_for(request.content_length or 0):
            with draft_of(self._store.root / ".incoming" / "shard") as draft:
                if await receive(request, draft) != expected:
                    raise web.HTTPBadRequest(text="the shard does not fit its checksum")
                self._store.delete(f"{key}.meta")
                await in_thread(lambda: self._store.put(draft, key, link=True))
                self._store.put_if_absent(meta.encode(), f"{key}.meta")
        for step in self._complete(namespace, config["num_ranks"])[config["steps_retained"] :]:
            self._forget(f"{_ROOT}/{namespace}/{step}/")
        return web.json_response({})

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Give a shard, with what was said of it."""
        from polyturn.storage.memory_tier.server import send

        key = _key(request)
        meta = self._store.read(f"{key}.meta").decode()
        if not self._store.exists(key):
            raise MissingKeyError("there is no such shard")
        return await send(request, self._store.path(key), {_META: meta})

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Forget a shard."""
        key = _key(request)
        self._store.delete(f"{key}.meta")
        self._store.delete(key)
        return web.json_response({})

    async def reset(self, request: web.Request) -> web.StreamResponse:
        """Forget everything of this protocol."""
        self._forget(f"{_ROOT}/")
        return web.json_response({})

    def _config(self, namespace: str) -> Any:
        return json.loads(self._store.read(f"{_ROOT}/{namespace}/namespace.json"))

    def _complete(self, namespace: str, num_ranks: int) -> list[int]:
        ranks: dict[int, int] = {}
        for entry in self._store.list(f"{_ROOT}/{namespace}/"):
            step, _, rank = entry.key.removeprefix(f"{_ROOT}/{namespace}/").partition("/")
            if step.isdigit() and rank.endswith(".meta"):
                ranks[int(step)] = ranks.get(int(step), 0) + 1
        return sorted((step for step, count in ranks.items() if count == num_ranks), reverse=True)

    def _forget(self, prefix: str) -> None:
        for entry in self._store.list(prefix):
            self._store.delete(entry.key)


def _namespace(request: web.Request) -> str:
    namespace = request.match_info["namespace"]
    if not _NAMESPACE.fullmatch(namespace):
        raise web.HTTPBadRequest(text="a namespace is made of letters, digits, '.', '_' and '-'")
    return namespace


def _key(request: web.Request) -> str:
    step, rank = int(request.match_info["step"]), int(request.match_info["rank"])
    return f"{_ROOT}/{_namespace(request)}/{step}/{rank}"


def _number(request: web.Request, name: str, default: int | None = None) -> int:
    said = request.query.get(name)
    if said is None and default is not None:
        return default
    if said is None or not said.isdigit() or int(said) < 1:
        raise web.HTTPBadRequest(text=f"{name}={said}; give a number from 1 on")
    return int(said)


def _checksum(meta: str) -> str:
    """The xxh3_128 that a Shard-Meta header says, in hexadecimal."""
    try:
        said = json.loads(meta)
        if said["algorithm"] != "xxh3_128":
            raise ValueError(f"the algorithm {said['algorithm']!r} is not xxh3_128")
        return base64.b64decode(said["checksum"], validate=True).hex()
    except (ValueError, KeyError, TypeError, StorageError) as error:
        raise web.HTTPBadRequest(text=f"the header {_META} can't be read: {error}") from error
