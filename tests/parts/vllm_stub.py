"""A server with the routes of vLLM and the answers of our worker extension, around tensors that it shares: no vLLM in it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch
from aiohttp import web

from polyturn.weight_sync.base import checksum
from polyturn.weight_sync.shared_tensors import SharedTensors, move_to_shared_memory
from polyturn.weight_sync.transfer import UpdateInfo


class SharingStub:
    """Holds `tensors`, which the first `polyturn_share` moves into shared memory.

    Like a CPU's, its layers compute with copies, those in `packed`, which are made anew whenever a version is stamped.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], token: str | None = None) -> None:
        self.tensors = dict(tensors)
        self.packed = {name: tensor.clone() for name, tensor in tensors.items()}
        self.asked: list[str] = []
        """Routes, and methods of the extension, in the order in which they were asked for."""
        self.label = "default"
        self.identity: str | None = None
        self.paused = False
        self.forgets = True
        self.refused: str | None = None
        self.device = "cpu"
        self.gpu: str | None = None
        self.workers = 1
        self.token = token
        self.url = ""
        self._block: Any = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.post(path, self._route) for path in ("/pause", "/resume", "/update_weight_version")])
        app.add_routes([web.post("/reset_prefix_cache", self._route), web.post("/collective_rpc", self._rpc)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def before_stamp(self) -> None:
        """What may go wrong."""

    def stamped(self, version: int) -> int:
        """The version that it serves from now on."""
        return version

    async def _route(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path in ("/pause", "/resume"):
            self.paused = request.path == "/pause"
        return web.json_response({"success": self.forgets})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["method"])
        try:
            answer = await getattr(self, body["method"])(*body["args"])
        except Exception as error:
            return web.json_response({"error": {"message": str(error), "type": type(error).__name__}}, status=500)
        return web.json_response({"results": [answer] * self.workers})

    # ── the extension ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def polyturn_state(self) -> dict[str, Any]:
        return {"weight_version": self.label, "device": self.device, "gpu": self.gpu, "receives": True, "shared": self.identity}

    polyturn_settle = polyturn_state

    async def polyturn_describe(self) -> dict[str, Any]:
        return {"weights": UpdateInfo.of(self.tensors).to_json(), "aliases": {}, "unknown": None, **await self.polyturn_state()}

    async def polyturn_checksums(self) -> dict[str, Any]:
        return {"checksums": {name: str(checksum(tensor, signed_zeros=False)) for name, tensor in self.packed.items()}}

    async def polyturn_share(self) -> dict[str, Any]:
        if self.refused is not None:
            return {"shared": None, "refused": self.refused}
        if self._block is None:
            self._block = move_to_shared_memory(list(self.tensors.values()))
        block, memory = self._block
        shared = SharedTensors.of(self.tensors, {memory.untyped_storage().data_ptr(): block}, None)
        self.identity = shared.identity
        return {"shared": shared.to_json(), "refused": None}

    async def polyturn_stamp(self, label: str) -> dict[str, Any]:
        await self.before_stamp()
        for name, tensor in self.tensors.items():
            self.packed[name].copy_(tensor)
        self.label = str(self.stamped(int(label)))
        return await self.polyturn_state()


def module_of(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose parameters have these names and are these tensors."""
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        holder = made
        for part in path:
            if part not in dict(holder.named_children()):
                holder.add_module(part, torch.nn.Module())
            holder = holder.get_submodule(part)
        holder.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return made


async def hang() -> None:
    await asyncio.sleep(3600)
