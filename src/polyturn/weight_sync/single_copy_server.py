"""The `single_copy` bridge to vLLM servers on the trainer's own devices: one copy of the weights for two processes.

    meet (the first time): does it fit? ─> pause (keep) ─> share ─> the trainer's parameters become views ─┐
    hold, before the trainer steps: pause (keep) ─> the server's device is idle ─> the optimizer's step ───┤
                                                                                                           │
        resume <─ reset the prefix cache <─ checksums <─ confirm <─ stamp the version <─ check: same server, same views

With several ranks each has a worker of a server: rank 0 drives all servers, and rank N's parameters are views of the tensors of
worker N, counted through all servers. Servers have one worker each, or as many as ranks compute a layer together.

Where the tensors are, a server says over HTTP (`shared_tensors`). They are its own and end with it: a server that ends or is
started anew ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from polyturn.errors import PolyturnError, WeightMismatchError, WeightSyncError
from polyturn.processes.deadlines import deadline
from polyturn.processes.json_http import AskError
from polyturn.weight_sync.base import check_coverage
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.pushing import Pushing
from polyturn.weight_sync.servers import Described, WeightServer, identity_of
from polyturn.weight_sync.shared_tensors import SharedTensors

RESUME_S = 2.0
"""How long a server may take to resume after a push that failed."""


class SharedParameters(Protocol):
    """The trainer's parameters, on one rank or on each of several. All of it blocks."""

    def weights(self) -> Mapping[str, Tensor]:
        """By name, with whole shapes."""

    def whole(self) -> Mapping[str, Tensor]:
        """By name, with all numbers."""

    def adopt(self, places: Sequence[SharedTensors]) -> None:
        """Make the parameters of rank N views of the tensors at place N, which get their values. Raises WeightSyncError.

        What a worker has some rows of, by the vocabulary, stays the rank's own, and is copied.
        """

    def check_adopted(self) -> None:
        """Copy what is copied, wait for the devices, and raise WeightMismatchError unless all else still is the engine's."""


class SingleCopyServerBridge:
    """Lets `parameters` be views of the tensors of the servers at `urls`, a worker a rank, which then are the only copy.

    Checksums are compared at the first push and at every `verify_every`-th: what a server's layers compute with may be
    another copy than the parameters that they show. `probe` compares log-probabilities at these pushes, too.
    """

    def __init__(
        self,
        urls: Sequence[str],
        parameters: SharedParameters,
        *,
        verify_every: int,
        deadline_s: float,
        token: str | None = None,
        probe: Probe | None = None,
        on_confirmed: Callable[[str, int], None] | None = None,
    ) -> None:
        self._pushing = Pushing(urls, deadline_s=deadline_s, token=token, probe=probe)
        self._parameters = parameters
        self._verify_every = verify_every
        self._on_confirmed = on_confirmed or (lambda url, version: None)
        self._identities: list[str] = []
        """Of what each server shares; empty until the parameters are views of it."""
        self._confirmed: int | None = None
        self._pushes = 0
        self._paused = False

    @property
    def seconds(self) -> dict[str, float]:
        """See `WeightBridge.seconds`."""
        return self._pushing.seconds

    async def hold(self, version: int) -> None:
        """See `WeightBridge.hold`. Before the first push, nothing is shared yet."""
        if self._identities:
            await self._pushing.run(version, self._pause)

    async def push(self, version: int) -> None:
        """See `WeightBridge.push`. Errors name the server and the phase."""
        try:
            await self._pushing.run(version, lambda: self._push(version))
        except BaseException as error:
            if isinstance(error, WeightMismatchError):
                self._paused = False  # they stay so: who computes with other weights than the trainer's must not answer
            await self._resume_if_paused()
            raise
        self._pushes += 1

    async def close(self) -> None:
        """Let servers that wait answer again, and close the connections. The parameters keep their memory."""
        await self._resume_if_paused()
        await self._pushing.client.close()

    # ── phases ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _push(self, version: int) -> None:
        pushing, verify = self._pushing, self._pushes % self._verify_every == 0
        if not self._identities:
            await self._meet()
        await self._pause()
        if not self._identities:
            shared = await pushing.each("share", WeightServer.shared)
            await pushing.alone("adopt", self._parameters.adopt, [worker for workers in shared for worker in workers])
            self._identities = [identity_of(worker.identity for worker in workers) for workers in shared]
        else:
            await self._refuse_other_labels(version)
        # What the trainer's devices still compute must be in the tensors before the servers read them.
        await pushing.alone("check", self._parameters.check_adopted)
        await self._stamp(version)
        if verify and not await pushing.compare(self._parameters.whole()):
            raise WeightSyncError(
                "an engine server can't say the checksums of what it computes with; use weight_sync.mode=nccl"
            )
        await self._forget_prefixes(version)
        for server in pushing.servers:
            self._on_confirmed(server.url, version)
        await pushing.each("resume", lambda server: server.ask("POST", "/resume"))
        self._paused = False
        if verify:
            await pushing.probe()

    async def _meet(self) -> None:
        """Refuse what does not fit, before anything changes."""
        told: list[Described] = await self._pushing.each("meet", WeightServer.describe)
        weights = self._parameters.weights()
        place = next(iter(weights.values())).device.type
        for server, one in zip(self._pushing.servers, told, strict=True):
            if one.unknown is not None:
                raise WeightSyncError(f"{one.unknown}, so there can't be one copy of it; use weight_sync.mode=restart or nccl")
            check_coverage(weights, one.weights.tensors())
            if one.device != place:
                raise WeightSyncError(
                    f"{server.url} has its weights on the {one.device} and the trainer on the {place}, so there can't be one "
                    "copy of them; use weight_sync.mode=nccl"
                )

    async def _pause(self) -> None:
        """No token is computed from when this returns."""
        self._paused = True
        await self._pushing.each("pause", lambda server: server.ask("POST", "/pause?mode=keep"))
        found = await self._pushing.each("pause", WeightServer.sharing)
        for server, identity, known in zip(self._pushing.servers, found, self._identities or found, strict=True):
            if identity == known:
                continue
            if identity is None:
                raise WeightSyncError(
                    f"{server.url} was started anew: the tensors that were the trainer's weights too ended with the server "
                    "before; start the run again, and it goes on from its last checkpoint"
                )
            raise WeightSyncError(f"{server.url} shares its weights with another run by now; each needs a server of its own")

    async def _refuse_other_labels(self, version: int) -> None:
        labels = await self._pushing.each("check", WeightServer.label)
        for server, label in zip(self._pushing.servers, labels, strict=True):
            if self._confirmed is not None and label != str(self._confirmed):
                raise WeightSyncError(
                    f"{server.url} serves weights {label!r} before push {version}, and it had confirmed version "
                    f"{self._confirmed}: another run pushes to it"
                )

    async def _stamp(self, version: int) -> None:
        await self._pushing.each("stamp", lambda server: server.stamp(version))
        labels = await self._pushing.each("confirm", WeightServer.label)
        for server, label in zip(self._pushing.servers, labels, strict=True):
            if label != str(version):
                raise WeightSyncError(
                    f"weight push {version} was not confirmed: the engine serves version {label} at {server.url}"
                )
        self._confirmed = version

    async def _forget_prefixes(self, version: int) -> None:
        """Drop keys and values of older weights. Requests that wait start over, since theirs are among them."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        answers = await self._pushing.each("reset the prefix cache", lambda server: server.ask("POST", path))
        for server, answer in zip(self._pushing.servers, answers, strict=True):
            if answer is not None and not answer.get("success", True):
                raise WeightMismatchError(
                    f"after push {version} {server.url} did not reset its prefix cache; it would answer from keys and values "
                    "of older weights"
                )

    async def _resume_if_paused(self) -> None:
        paused, self._paused = self._paused, False

        async def resume(server: WeightServer) -> None:
            with contextlib.suppress(AskError, PolyturnError):
                async with deadline(RESUME_S, f"{server.url} to resume"):
                    await server.ask("POST", "/resume")

        if paused:
            await asyncio.gather(*map(resume, self._pushing.servers))
