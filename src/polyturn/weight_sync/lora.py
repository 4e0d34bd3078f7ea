"""The `lora` bridge: adapters only, as files that vLLM servers load by name.

    save: whole or not at all ─> load under a name of its own ─> listed? ─> checksums of what was loaded, or the probe
                                                             ─> requests ask for it by that name ─> unload older ones

Nothing is paused and nothing is overwritten. A request that is under way ends with the adapters that it began with; the name
says which ones those are, and an answer that was sampled by another name is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polyturn.errors import WeightMismatchError, WeightSyncError
from polyturn.processes.json_http import AskError
from polyturn.weight_sync.base import check_sums, checksum
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.pushing import Pushing, say_probed
from polyturn.weight_sync.saved import SavedFolders
from polyturn.weight_sync.servers import WeightServer

KEEP = 2
"""Adapters that stay loaded: the newest, and the one before, for requests that are on their way."""


class LoraBridge:
    """Pushes the adapters to the servers at `urls`.

    `adapters()` are the trainer's by PEFT's names, `frozen()` the base that they belong to, which the servers must have too.
    `scaling` is alpha / rank; `save(folder)` writes the adapters as PEFT does. Checksums are compared at the first push and at
    every `verify_every`-th. `on_confirmed(url, version, name)` hears by which name a version is asked for.
    """

    def __init__(
        self,
        urls: Sequence[str],
        adapters: Callable[[], Mapping[str, torch.Tensor]],
        frozen: Callable[[], Mapping[str, torch.Tensor]],
        save: Callable[[Path], None],
        folder: Path,
        *,
        scaling: float,
        verify_every: int,
        deadline_s: float,
        token: str | None = None,
        probe: Probe | None = None,
        on_confirmed: Callable[[str, int, str], None] | None = None,
    ) -> None:
        self._pushing = Pushing(urls, deadline_s=deadline_s, token=token, probe=probe)
        self._adapters = adapters
        self._frozen = frozen
        self._folders = SavedFolders(folder, save, keep=KEEP)
        self._scaling = scaling
        self._verify_every = verify_every
        self._on_confirmed = on_confirmed or (lambda url, version, name: None)
        self._run = secrets.token_hex(4)
        self._names: list[str] = []
        self._pushes = 0
        self._attempts = 0
        self._checksums: bool | None = None
        """Whether the servers can say checksums; None until they were asked."""

    @property
    def seconds(self) -> dict[str, float]:
        """See `WeightBridge.seconds`."""
        return self._pushing.seconds

    async def push(self, version: int) -> None:
        """See `WeightBridge.push`. Errors name the server and the phase."""
        await self._pushing.run(version, lambda: self._push(version))
        self._pushes += 1

    async def hold(self, version: int) -> None:
        """Nothing: the engine's weights are its own."""

    async def close(self) -> None:
        """Unload the adapters where that can be done at once, close the connections, remove the files."""
        for name in self._names:
            for server in self._pushing.servers:
                await _unload(server, name)
        await self._pushing.client.close()
        self._folders.remove_all()

    async def _push(self, version: int) -> None:
        pushing, verify = self._pushing, self._pushes % self._verify_every == 0
        if self._checksums is None:
            self._checksums = await self._compare_bases()
        self._attempts += 1
        # No two runs, versions or attempts share a name: what is asked for by it can't be anything else.
        name = f"policy-{self._run}-{version}-{self._attempts}"
        folder = await pushing.alone("save", self._folders.write, name)
        await pushing.each("load", lambda server: _load(server, name, folder))
        self._names.append(name)
        await pushing.each("confirm", lambda server: _refuse_unlisted(server, name, version))
        if self._checksums and verify:
            await self._compare(version)
        if not self._checksums:
            await pushing.probe(model=name)
        for server in pushing.servers:
            self._on_confirmed(server.url, version, name)
        while len(self._names) > KEEP:
            old = self._names.pop(0)
            await pushing.each("unload", lambda server, old=old: _unload(server, old))  # type: ignore[misc]
        self._folders.forget_old()

    async def _compare_bases(self) -> bool:
        """Refuse servers whose base is another one. False where they can't say checksums."""
        if await self._pushing.compare(_Plain(self._frozen())):
            return True
        say_probed("an engine server can't compare checksums")
        return False

    async def _compare(self, version: int) -> None:
        """The newest adapters of every worker must be the trainer's, to the bit."""
        for server, workers in zip(
            self._pushing.servers, await self._pushing.each("checksums", WeightServer.adapters), strict=True
        ):
            for worker in workers:
                dtype = getattr(torch, worker["dtype"])
                ours = await self._pushing.alone("checksums", _adapter_sums, self._adapters(), dtype, self._scaling)
                theirs = {name: int(total) for name, total in worker["checksums"].items()}
                if theirs.keys() != ours.keys():
                    missing = sorted(theirs.keys() ^ ours.keys())[0]
                    raise WeightMismatchError(
                        f"after push {version} the adapters at {server.url} are {len(theirs)} tensors and the trainer's "
                        f"{len(ours)}; {missing} is in one only"
                    )
                check_sums(ours, theirs, version, f" at {server.url}")


class _Plain(Mapping[str, torch.Tensor]):
    """Tensors of a base by the names that they have without adapters. Of shards one at a time is whole, as in what it is of."""

    def __init__(self, base: Mapping[str, torch.Tensor]) -> None:
        self._base = base
        self._names = {name.replace(".base_layer", ""): name for name in base}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._base[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


async def _load(server: WeightServer, name: str, folder: Path) -> None:
    try:
        await server.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())}, text=True)
    except AskError as error:
        if error.status == 404:
            raise WeightSyncError(
                f"{server.url} loads no adapters ({error.reason}); start it with --enable-lora, and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            ) from error
        raise


async def _unload(server: WeightServer, name: str) -> None:
    """Forget an adapter; one that is not there is forgotten already, and so is one of a server that is gone."""
    try:
        await server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, text=True)
    except AskError as error:
        if error.status is not None and error.status >= 500:
            raise


async def _refuse_unlisted(server: WeightServer, name: str, version: int) -> None:
    listed: list[Any] = (await server.ask("GET", "/v1/models"))["data"]
    if name not in {model["id"] for model in listed}:
        raise WeightSyncError(f"weight push {version} was not confirmed: {server.url} does not list the adapters {name}")


@torch.no_grad()
def _adapter_sums(adapters: Mapping[str, torch.Tensor], dtype: torch.dtype, scaling: float) -> dict[str, int]:
    """Checksums as a worker has them: in its type, the second matrix multiplied by the scaling."""
    sums = {}
    for name, tensor in adapters.items():
        held = tensor.detach().to(dtype, copy=True)
        if ".lora_B." in name and scaling != 1:
            held *= scaling
        sums[name.replace(".default.", ".")] = checksum(held, signed_zeros=False)
    return sums
