"""What the bridges by file share: a push to all servers at once, within a deadline, with server and phase in its errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch

from polyturn.errors import DeadlineError, PolyturnError, WeightMismatchError, WeightSyncError
from polyturn.processes.deadlines import deadline
from polyturn.processes.json_http import AskError, JsonClient
from polyturn.processes.tasks import TaskSet
from polyturn.processes.threads import in_thread
from polyturn.weight_sync.base import check_sums, checksum, named
from polyturn.weight_sync.phases import Phases
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.servers import WeightServer

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Pushing:
    """Pushes to the servers at `urls`. A bridge says what a push does, with `each` and `phase`."""

    def __init__(self, urls: Sequence[str], *, deadline_s: float, token: str | None, probe: Probe | None) -> None:
        self.client = JsonClient(token)
        self.servers = [WeightServer(url.rstrip("/"), self.client, limit_s=deadline_s) for url in urls]
        self.deadline_s = deadline_s
        self.version = 0
        self._probe = probe
        self._phases = Phases()
        self._waiting: set[str] = set()

    @property
    def seconds(self) -> dict[str, float]:
        """What each phase of the last push took, also of one that failed."""
        return self._phases.seconds

    async def run(self, version: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await `work()` as push `version` or a part of it. Raises WeightSyncError, WeightMismatchError or DeadlineError."""
        self.version = version
        self._phases.begin()
        plural = "s" * (len(self.servers) > 1)
        try:
            async with deadline(self.deadline_s, f"weight push {version} to {len(self.servers)} engine server{plural}"):
                await work()
        except DeadlineError as error:
            who = " and ".join(sorted(self._waiting)) or "the trainer itself"
            raise DeadlineError(f"{error}; in {self._phases.now}, it waited for {who}") from error
        except PolyturnError:
            raise
        except Exception as error:
            raise WeightSyncError(f"weight push {version} failed: {type(error).__name__}: {error}") from error
        finally:
            self._at("", ())

    async def alone(self, phase: str, function: Callable[..., T], *arguments: Any) -> T:
        """A phase of the trainer's own, in a thread."""
        self._at(phase, ())
        return await in_thread(function, *arguments)

    async def each(self, phase: str, act: Callable[[WeightServer], Coroutine[Any, Any, T]]) -> list[T]:
        """What every server says, all asked at once."""
        self._at(phase, [server.url for server in self.servers])

        async def asking(server: WeightServer) -> T:
            try:
                answer = await act(server)
            except AskError as error:
                raise WeightSyncError(f"weight push {self.version} failed in {phase}: {error}") from error
            self._waiting.discard(server.url)
            return answer

        async with TaskSet(f"the servers' answers in {phase}") as tasks:
            answers = [tasks.start(asking(server), server.url) for server in self.servers]
        return [answer.result() for answer in answers]

    def _at(self, phase: str, waiting: Sequence[str]) -> None:
        """One phase ends and the next begins."""
        self._phases.at(phase)
        self._waiting = set(waiting)

    async def compare(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Compare checksums with every server's; False where one can't say any. Raises WeightMismatchError."""
        told = await self.each("checksums", WeightServer.comparable)
        if any(one is None for one in told):
            return False
        for server, one in zip(self.servers, told, strict=True):
            types, theirs = one or ({}, {})
            missing = sorted(theirs.keys() ^ weights.keys())
            if missing:
                raise WeightMismatchError(
                    f"{server.url} and the trainer don't have the same tensors; in one only: {named(missing)}"
                )
            ours = await self.alone("checksums", _sums, weights, types)
            check_sums(ours, theirs, self.version, f" at {server.url}")
        return True

    async def probe(self, *, model: str | None = None) -> None:
        """Probe every server. Raises WeightMismatchError past the limit."""
        probe = self._probe
        if probe is None:
            return
        await self.each(
            "probe",
            lambda server: probe.check(self.client, server.url, self.version, limit_s=self.deadline_s, model=model),
        )


def say_probed(why: str) -> None:
    """Say, once at the start, that the probe stands in for checksums."""
    _log.warning("%s; what it serves is checked by the log-probabilities of a few tokens after each push instead", why)


@torch.no_grad()
def _sums(weights: Mapping[str, torch.Tensor], types: Mapping[str, torch.dtype]) -> dict[str, int]:
    return {name: checksum(tensor.to(types[name]), signed_zeros=False) for name, tensor in weights.items()}
