"""The `restart` bridge: writes the weights to a folder, and has the servers that the run started start anew from it.

    save ─> restart: the role ends its server, starts it with the folder, waits until it is healthy ─> stamp ─> checksums

It is slow and has nothing that could be half done: the fallback when another bridge is doubted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from polyturn.errors import WeightMismatchError, WeightSyncError
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.pushing import Pushing, say_probed
from polyturn.weight_sync.saved import SavedFolders
from polyturn.weight_sync.servers import WeightServer


class RestartBridge:
    """Pushes `weights()` to the servers at `urls`, whose roles take orders at `controls`, in the same order.

    `save(folder)` writes a whole model. Checksums are compared at the first push and at every `verify_every`-th.
    """

    def __init__(
        self,
        urls: Sequence[str],
        controls: Sequence[str],
        weights: Callable[[], Mapping[str, torch.Tensor]],
        save: Callable[[Path], None],
        folder: Path,
        *,
        verify_every: int,
        deadline_s: float,
        token: str | None = None,
        probe: Probe | None = None,
        on_confirmed: Callable[[str, int], None] | None = None,
    ) -> None:
        self._pushing = Pushing(urls, deadline_s=deadline_s, token=token, probe=probe)
        self._controls = dict(zip((server.url for server in self._pushing.servers), controls, strict=True))
        self._weights = weights
        self._folders = SavedFolders(folder, save, keep=1)
        self._verify_every = verify_every
        self._on_confirmed = on_confirmed or (lambda url, version: None)
        self._pushes = 0
        self._confirmed: int | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """See `WeightBridge.seconds`."""
        return self._pushing.seconds

    async def push(self, version: int) -> None:
        """See `WeightBridge.push`. Errors name the server and the phase."""
        await self._pushing.run(version, lambda: self._push(version))
        self._pushes += 1
        self._confirmed = version

    async def hold(self, version: int) -> None:
        """Nothing: the engine's weights are its own."""

    async def close(self) -> None:
        """Close the connections and remove the saved weights."""
        await self._pushing.client.close()
        self._folders.remove_all()

    async def _push(self, version: int) -> None:
        pushing, verify = self._pushing, self._pushes % self._verify_every == 0
        if not await self._serves_them_already(version):
            folder = await pushing.alone("save", self._folders.write, f"version-{version}-{self._pushes}")
            order = {"model": str(folder.resolve()), "version": str(version)}

            async def restart(server: WeightServer) -> None:
                url = f"{self._controls[server.url]}/restart"
                await pushing.client.ask("POST", url, order, limit_s=pushing.deadline_s)

            await pushing.each("restart", restart)
            compared = verify and await pushing.compare(self._weights())
            if not compared:
                await pushing.probe()
        await pushing.each("stamp", lambda server: server.stamp(version))
        for server, label in zip(pushing.servers, await pushing.each("confirm", WeightServer.label), strict=True):
            if label != str(version):
                raise WeightSyncError(
                    f"weight push {version} was not confirmed: the engine serves version {label} at {server.url}"
                )
        self._folders.forget_old()
        for server in pushing.servers:
            self._on_confirmed(server.url, version)

    async def _serves_them_already(self, version: int) -> bool:
        """Whether nothing need move: the first push of a run brings what the servers began with, the last what they have."""
        pushing = self._pushing
        if self._confirmed == version:
            return set(await pushing.each("check", WeightServer.label)) == {str(version)}
        if self._confirmed is not None:
            return False
        await pushing.each("meet", WeightServer.describe)
        try:
            if await pushing.compare(self._weights()):
                return True
            say_probed("an engine server can't compare checksums")
        except WeightMismatchError:
            pass  # they began with other weights than the trainer has
        return False
