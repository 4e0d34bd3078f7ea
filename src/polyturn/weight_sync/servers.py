"""An engine server as a bridge sees it: our own `hf_server`, or vLLM with Polyturn's worker extension.

Both have vLLM's routes for an update. What vLLM has no route for (names and shapes, checksums, the label of the weights in
versions before 0.28, giving an update up) the extension answers through `/collective_rpc`, once for every worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from polyturn.errors import WeightSyncError
from polyturn.processes.json_http import AskError, JsonClient
from polyturn.weight_sync.labels import BACKEND, BROKEN_LABEL, EXTENSION, RPC, WEIGHTS_ROUTE
from polyturn.weight_sync.shared_tensors import SharedTensors
from polyturn.weight_sync.transfer import UpdateInfo

_ARGUMENTS = f'--worker-extension-cls {EXTENSION} --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''

Kind: TypeAlias = Literal["hf_server", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a server holds."""

    kind: Kind
    weights: UpdateInfo
    device: str
    aliases: Mapping[str, str]
    """Names of tensors that are another one, and of which."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of its workers, as far as it says them."""
    unknown: str | None = None
    """Why `weights` is empty: a layer whose tensors have no names that are known. The server may take a push all the same."""


class WeightServer:
    """The server at `url`. All methods raise AskError for an answer that is none, DeadlineError after `limit_s`."""

    def __init__(self, url: str, client: JsonClient, *, limit_s: float) -> None:
        self.url = url
        self.kind: Kind | None = None
        self._client = client
        self._limit_s = limit_s

    async def ask(self, method: str, path: str, body: object = None, *, text: bool = False) -> Any:
        """The answer of one route."""
        return await self._client.ask(method, self.url + path, body, limit_s=self._limit_s, text=text)

    async def describe(self) -> Described:
        """Names, types and shapes of its weights. Raises WeightSyncError for a server that can't take a push."""
        try:
            told = await self.ask("GET", WEIGHTS_ROUTE)
            self.kind = "hf_server"
            return Described(
                kind="hf_server",
                weights=UpdateInfo.from_json(told["weights"]),
                device=told["device"],
                aliases={},
                gpus=_gpus([told]),
            )
        except AskError as error:
            if error.status != 404:
                raise
        workers = await self._workers("polyturn_describe")
        self.kind = "vllm"
        if not all(worker["receives"] for worker in workers):
            raise WeightSyncError(
                f"{self.url} is a vLLM server without Polyturn's weight-transfer backend; start it with {_ARGUMENTS}, or use "
                "weight_sync.mode=lora"
            )
        first = workers[0]
        weights = UpdateInfo.from_json(first["weights"])
        return Described(
            kind="vllm",
            weights=weights,
            device=first["device"],
            aliases=first["aliases"],
            gpus=_gpus(workers),
            unknown=first["unknown"],
        )

    async def checksums(self) -> dict[str, int]:
        """Checksums of what it computes with, by name."""
        if self.kind == "vllm":
            told = (await self._workers("polyturn_checksums"))[0]
        else:
            told = await self.ask("GET", f"{WEIGHTS_ROUTE}?checksums=true")
        return {name: int(total) for name, total in told["checksums"].items()}

    async def comparable(self) -> tuple[dict[str, torch.dtype], dict[str, int]] | None:
        """Types and checksums of what it computes with, by name; None for a vLLM server that has no means to say them."""
        try:
            (worker, *_), (told, *_) = await self._workers("polyturn_describe"), await self._workers("polyturn_checksums")
        except WeightSyncError:
            return None
        if worker["unknown"] is not None:
            return None
        weights = UpdateInfo.from_json(worker["weights"]).tensors()
        sums = {name: int(total) for name, total in told["checksums"].items()}
        return {name: tensor.dtype for name, tensor in weights.items()}, sums

    async def adapters(self) -> list[Any]:
        """The newest adapters of every worker: their type, and checksums by name."""
        return await self._workers("polyturn_adapters")

    async def stamp(self, version: int) -> None:
        """Have a vLLM server call its weights `version`."""
        await self._workers("polyturn_stamp", str(version))
        try:
            await self.ask("POST", "/update_weight_version", {"new_version": str(version)})
        except AskError as error:
            if error.status != 404:  # vLLM before 0.28 has no versions of its own
                raise

    async def shared(self) -> list[SharedTensors]:
        """Where the weights of a vLLM server's workers lie, for processes on the same machine.

        Raises WeightSyncError when one can't say.
        """
        told = await self._workers("polyturn_share")
        for worker in told:
            if worker["refused"] is not None:
                raise WeightSyncError(f"{self.url}: {worker['refused']}")
        return [SharedTensors.from_json(worker["shared"]) for worker in told]

    async def sharing(self) -> str | None:
        """The identity under which a vLLM server shares its weights, once its devices are idle."""
        told = [worker["shared"] for worker in await self._workers("polyturn_settle")]
        return None if None in told else identity_of(map(str, told))

    async def label(self) -> str:
        """What it calls its weights."""
        if self.kind != "vllm":
            return str((await self.ask("GET", "/weight_info"))["weight_version"])
        labels = {str(worker["weight_version"]) for worker in await self._workers("polyturn_state")}
        return labels.pop() if len(labels) == 1 else BROKEN_LABEL

    async def start(self) -> None:
        """Open an update."""
        await self.ask("POST", "/start_weight_update")

    async def update(self, coming: UpdateInfo, version: int) -> None:
        """Receive all of `coming` from the group."""
        info = coming.to_json() | ({"version": str(version)} if self.kind == "vllm" else {})
        await self.ask("POST", "/update_weights", {"update_info": info})

    async def put_back(self) -> bool:
        """Give up an update that is open, of whoever's. Whether its weights are whole then, and it may serve them.

        Our own server needs no asking: with mixed weights it refuses to serve by itself. vLLM would serve them.
        """
        if self.kind != "vllm":
            return True
        return all(worker["weight_version"] != BROKEN_LABEL for worker in await self._workers("polyturn_put_back"))

    async def _workers(self, method: str, *arguments: str) -> list[Any]:
        """The answers of all workers of a vLLM server. Raises WeightSyncError where they can't be asked."""
        try:
            answer = await self.ask("POST", RPC, {"method": method, "args": list(arguments)})
        except AskError as error:
            if error.status == 404:
                raise WeightSyncError(
                    f"{self.url} has no {RPC}: vLLM has it in development mode only; start the server with "
                    "VLLM_SERVER_DEV_MODE=1 in its environment"
                ) from error
            if error.status is not None and self.kind is None:
                raise WeightSyncError(
                    f"{self.url} is a vLLM server without Polyturn's worker extension ({error.reason}); start it with "
                    f"{_ARGUMENTS}"
                ) from error
            raise
        return list(answer["results"])


def identity_of(workers: Iterable[str]) -> str:
    """What a server is known by while it shares its weights, from what its workers are."""
    return "+".join(workers)


def refuse_shared_gpus(members: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Raise WeightSyncError where two of those that would meet over NCCL, by name and by UUIDs of GPUs, are on one GPU."""
    taken: dict[str, str] = {}
    for name, gpus in members:
        for gpu in gpus:
            if gpu in taken:
                raise WeightSyncError(
                    f"{taken[gpu]} and {name} are on one GPU ({gpu}), and NCCL takes a GPU into a group once, and refuses "
                    "or hangs; give each a GPU of its own, or use another weight_sync.mode"
                )
            taken[gpu] = name


def _gpus(workers: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(str(worker["gpu"]) for worker in workers if worker.get("gpu") is not None)
