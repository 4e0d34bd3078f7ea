"""The weight routes of an engine server: joins the trainer's group, receives the tensors, says what it has.

An update is `start`, any number of `update_weights`, `finish`; it replaces every tensor or leaves the engine refusing to
serve. vLLM refuses a `start` while an update is open; here it gives that one up, since a new one brings everything anyway.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from polyturn.engine.hf import HfEngine, WeightUpdate
from polyturn.errors import EngineError
from polyturn.processes.threads import in_thread, in_thread_within
from polyturn.weight_sync.base import checksum
from polyturn.weight_sync.labels import DEFAULT_LABEL
from polyturn.weight_sync.shared_tensors import uuid_of
from polyturn.weight_sync.transfer import InitInfo, TransferGroup, UpdateInfo, receive

JOIN_GRACE_S = 1.0
"""How much longer than its own limit joining a group may take: its own failure says more."""


class WeightRoutes:
    """What the weight routes do, each a method from the request's body to the answer's.

    All raise ValueError for a body that says nothing sensible, EngineError or WeightSyncError for what can't be done.
    """

    def __init__(self, engine: HfEngine) -> None:
        self.label = DEFAULT_LABEL
        self._engine = engine
        self._group: TransferGroup | None = None
        self._info: InitInfo | None = None
        self._update: WeightUpdate | None = None

    async def init(self, body: dict[str, Any]) -> dict[str, Any]:
        """Join a trainer's group, and leave the one before."""
        info = InitInfo.from_json(body.get("init_info"))
        await self.leave()
        device = next(iter(self._engine.named_weights().values())).device
        if info.backend == "nccl" and device.type != "cuda":
            raise ValueError(f"NCCL sends between GPUs, and this engine's weights are on the {device.type}; use gloo")
        what = f"the weight transfer group at {info.master_address}:{info.master_port}"
        self._group = await in_thread_within(info.timeout_s + JOIN_GRACE_S, what, TransferGroup, info, device)
        self._info = info
        return {"message": "Weight transfer initialized"}

    async def shutdown(self, body: dict[str, Any]) -> dict[str, Any]:
        """Leave the group."""
        await self.leave()
        return {"message": "Weight transfer shut down"}

    async def start(self, body: dict[str, Any]) -> dict[str, Any]:
        """Open an update; no batch runs from then on."""
        if self._group is None:
            raise EngineError("there is no weight transfer group; /init_weight_transfer_engine comes first")
        self._update = await self._engine.begin_update()
        return {"message": "Weight update started"}

    async def update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Receive tensors from the group into the model."""
        update = self._open_update()
        group, info = self._group, self._info
        if group is None or info is None:
            raise EngineError("there is no weight transfer group; /init_weight_transfer_engine comes first")
        try:
            coming = UpdateInfo.from_json(body.get("update_info")).tensors()
            self._check(update, coming)
            receiving = partial(
                receive,
                group,
                coming,
                partial(self._engine.load, update),
                bucket_bytes=info.packed_buffer_size_bytes,
                until=time.monotonic() + info.timeout_s,
            )
            await in_thread_within(info.timeout_s, "the tensors of a weight update", receiving)
        except BaseException as error:
            # The trainer left, or what it sent can't be used: parts of the old and the new weights lie side by side.
            self._engine.fail_update(update, f"a weight update did not complete ({type(error).__name__}: {error})")
            await self.leave()
            raise
        return {"message": "Weights updated"}

    async def finish(self, body: dict[str, Any]) -> dict[str, Any]:
        """Close the update; from then on its version is served."""
        label = body.get("weight_version")
        if not isinstance(label, str) or not label.isascii() or not label.isdigit():
            raise ValueError(f"weight_version must be a whole number as text, such as '3'; got {label!r}")
        self.label = str(self._engine.finish_update(self._open_update(), int(label)))
        self._update = None
        return {"message": "Weight update finished"}

    async def info(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the weights are called."""
        return {"weight_version": self.label}

    async def describe(self, body: dict[str, Any], *, checksums: bool) -> dict[str, Any]:
        """Names, types and shapes of all weights; with `checksums`, of their bits (as text: they have 64 bits)."""
        own = self._engine.named_weights()
        device = next(iter(own.values())).device
        answer: dict[str, Any] = {
            "weights": UpdateInfo.of(own).to_json(),
            "device": device.type,
            "gpu": uuid_of(device) if device.type == "cuda" else None,
            "weight_version": self.label,
        }
        if checksums:
            answer["checksums"] = await in_thread(_checksums, own)
        return answer

    async def leave(self) -> None:
        """Leave the group, if there is one."""
        group, self._group, self._info = self._group, None, None
        if group is not None:
            await group.leave()

    def _open_update(self) -> WeightUpdate:
        if self._update is None:
            raise EngineError("no weight update is open; /start_weight_update comes first")
        return self._update

    def _check(self, update: WeightUpdate, coming: dict[str, torch.Tensor]) -> None:
        for name, tensor in coming.items():
            own = update.own.get(name)
            if own is None or own.shape != tensor.shape:
                there = "which it lacks" if own is None else f"which it has as {tuple(own.shape)}"
                raise ValueError(f"this model can't take {name} as {tuple(tensor.shape)}, {there}")


@torch.no_grad()
def _checksums(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: str(checksum(tensor)) for name, tensor in weights.items()}
