"""The `single_copy` bridge to a vLLM server on the trainer's own device: one copy of the weights for two processes.

    meet (the first time): does it fit? ─> pause (keep) ─> share ─> the trainer's parameters become views ─┐
    hold, before the trainer steps: pause (keep) ─> the server's device is idle ─> the optimizer's step ───┤
                                                                                                           │
        resume <─ reset the prefix cache <─ checksums <─ confirm <─ stamp the version <─ check: same server, same views

Where the tensors are, the server says over HTTP (`shared_tensors`). They are its own and end with it: a server that ends or
is started anew ends the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from polyturn.errors import PolyturnError, WeightMismatchError, WeightSyncError
from polyturn.processes.deadlines import deadline
from polyturn.processes.json_http import AskError
from polyturn.weight_sync.base import check_coverage
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.pushing import Pushing
from polyturn.weight_sync.servers import WeightServer
from polyturn.weight_sync.shared_tensors import SharedTensors
from polyturn.weight_sync.single_copy import adopt, refuse_new_tensors

RESUME_S = 2.0
"""How long the server may take to resume after a push that failed."""


class SingleCopyServerBridge:
    """Lets the parameters of `model` be views of the tensors of the server at `url`, which then are the only copy.

    Checksums are compared at the first push and at every `verify_every`-th: what the server's layers compute with may be
    another copy than the parameters that they show. `probe` compares log-probabilities at these pushes, too.
    """

    def __init__(
        self,
        url: str,
        model: torch.nn.Module,
        *,
        verify_every: int,
        deadline_s: float,
        token: str | None = None,
        probe: Probe | None = None,
        on_confirmed: Callable[[str, int], None] | None = None,
    ) -> None:
        self._pushing = Pushing([url], deadline_s=deadline_s, token=token, probe=probe)
        (self._server,) = self._pushing.servers
        self._model = model
        self._verify_every = verify_every
        self._on_confirmed = on_confirmed or (lambda url, version: None)
        self._own: Mapping[str, Tensor] | None = None
        """The server's tensors, once the parameters are views of them."""
        self._identity = ""
        self._confirmed: int | None = None
        self._pushes = 0
        self._paused = False

    async def hold(self, version: int) -> None:
        """See `WeightBridge.hold`. Before the first push, nothing is shared yet."""
        if self._own is not None:
            await self._pushing.run(version, self._pause)

    async def push(self, version: int) -> None:
        """See `WeightBridge.push`. Errors name the server and the phase."""
        try:
            await self._pushing.run(version, lambda: self._push(version))
        except BaseException as error:
            if isinstance(error, WeightMismatchError):
                self._paused = False  # it stays so: who computes with other weights than the trainer's must not answer
            await self._resume_if_paused()
            raise
        self._pushes += 1

    async def close(self) -> None:
        """Let a server that waits answer again, and close the connections. The parameters keep their memory."""
        await self._resume_if_paused()
        await self._pushing.client.close()

    # ── phases ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _push(self, version: int) -> None:
        pushing, verify = self._pushing, self._pushes % self._verify_every == 0
        if self._own is None:
            await self._meet()
        await self._pause()
        if self._own is None:
            await self._share()
        else:
            await self._check(self._own, version)
        await pushing.alone("settle", self._settle)
        await pushing.each("stamp", lambda server: server.stamp(version))
        (label,) = await pushing.each("confirm", WeightServer.label)
        if label != str(version):
            raise WeightSyncError(
                f"weight push {version} was not confirmed: the engine serves version {label} at {self._server.url}"
            )
        self._confirmed = version
        if verify and not await pushing.compare(self._model.state_dict()):
            raise WeightSyncError(f"{self._server.url} can't say the checksums of what it computes with; use another mode")
        await self._forget_prefixes(version)
        self._on_confirmed(self._server.url, version)
        await pushing.each("resume", lambda server: server.ask("POST", "/resume"))
        self._paused = False
        if verify:
            await pushing.probe()

    async def _meet(self) -> None:
        """Refuse what does not fit, before anything changes."""
        (told,) = await self._pushing.each("meet", WeightServer.describe)
        if told.unknown is not None:
            raise WeightSyncError(f"{told.unknown}, so there can't be one copy of it; use weight_sync.mode=restart or nccl")
        check_coverage(self._model.state_dict(), told.weights.tensors())
        place = next(self._model.parameters()).device.type
        if told.device != place:
            raise WeightSyncError(
                f"{self._server.url} has its weights on the {told.device} and the trainer on the {place}, so there can't be "
                "one copy of them; use weight_sync.mode=nccl"
            )

    async def _pause(self) -> None:
        """No token is computed from when this returns."""
        self._paused = True
        await self._pushing.each("pause", lambda server: server.ask("POST", "/pause?mode=keep"))
        (identity,) = await self._pushing.each("pause", WeightServer.sharing)
        if self._own is not None and identity != self._identity:
            await self._refuse_other(identity)

    async def _share(self) -> None:
        (shared,) = await self._pushing.each("share", WeightServer.shared)
        self._own = await self._pushing.alone("share", self._open_and_adopt, shared)
        self._identity = shared.identity

    def _open_and_adopt(self, shared: SharedTensors) -> Mapping[str, Tensor]:
        own = shared.open()
        adopt(self._model, own)
        return own

    async def _check(self, own: Mapping[str, Tensor], version: int) -> None:
        """The server must be who it was, and the parameters still its tensors."""
        refuse_new_tensors(self._model, own)
        (label,) = await self._pushing.each("check", WeightServer.label)
        if self._confirmed is not None and label != str(self._confirmed):
            raise WeightSyncError(
                f"{self._server.url} serves weights {label!r} before push {version}, and it had confirmed version "
                f"{self._confirmed}: another run pushes to it"
            )

    async def _refuse_other(self, identity: str | None) -> None:
        if identity is None:
            raise WeightSyncError(
                f"{self._server.url} was started anew: the tensors that were the trainer's weights too ended with the server "
                "before; start the run again, and it goes on from its last checkpoint"
            )
        raise WeightSyncError(f"{self._server.url} shares its weights with another run by now; each needs a server of its own")

    def _settle(self) -> None:
        """What the trainer's device still computes must be in the tensors before the server reads them."""
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    async def _forget_prefixes(self, version: int) -> None:
        """Drop keys and values of older weights. Requests that wait start over, since theirs are among them."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        (answer,) = await self._pushing.each("reset the prefix cache", lambda server: server.ask("POST", path))
        if answer is not None and not answer.get("success", True):
            raise WeightMismatchError(
                f"after push {version} {self._server.url} did not reset its prefix cache; it would answer from keys and values "
                "of older weights"
            )

    async def _resume_if_paused(self) -> None:
        paused, self._paused = self._paused, False
        if paused:
            with contextlib.suppress(AskError, PolyturnError):
                async with deadline(RESUME_S, f"{self._server.url} to resume"):
                    await self._server.ask("POST", "/resume")
