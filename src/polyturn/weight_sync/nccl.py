"""The `nccl` bridge: sends the weights to engine servers over a process group, NCCL between GPUs and gloo otherwise.

The servers are told what to do over HTTP, by the routes of vLLM 0.32; the bytes go through the group (`transfer.py`). One
push, every phase on all servers at once:

    meet (the first time)  ─> pause (keep) ─> start ─> update: the tensors ─> finish: the version ─> confirm ─> checksums
                                                                                ─> reset the prefix cache ─> resume

A push that fails resumes the servers that may serve, and leaves the group; the next push meets anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from polyturn.errors import DeadlineError, PolyturnError, WeightMismatchError, WeightSyncError
from polyturn.processes.deadlines import deadline
from polyturn.processes.json_http import AskError, JsonClient
from polyturn.processes.tasks import TaskSet
from polyturn.processes.threads import in_thread
from polyturn.weight_sync.base import WeightSource, check_coverage, check_sums
from polyturn.weight_sync.labels import DEFAULT_LABEL
from polyturn.weight_sync.phases import Phases
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.servers import Described, WeightServer, refuse_shared_gpus
from polyturn.weight_sync.shared_tensors import uuid_of
from polyturn.weight_sync.transfer import (
    BUCKET_BYTES,
    NCCL_BUCKET_BYTES,
    InitInfo,
    TransferError,
    TransferGroup,
    UpdateInfo,
    like,
    listen,
    send,
)

RESUME_S = 2.0
"""How long a server may take to resume after a push that failed."""
LOOK_S = 5.0
"""How long a server may take to say that it is there, where a push may go without it."""
REASON_S = 2.0
"""How long a server may take to say why a broadcast failed. What the sender sees of it names no server."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


class NcclBridge:
    """Pushes `source` to the servers at `urls`, all at once.

    `token` is the servers' bearer token. `host` is the address of this machine where they find the group's store. Checksums
    are compared at the first push and at every `verify_every`-th. `on_confirmed(url, version)` hears what each server serves
    after a push, before it answers requests again. With `may_miss` a push leaves out servers that can't be reached, as long as
    there is one, and brings those back that were restarted. `probe` is for servers of an architecture without checksums.
    """

    def __init__(
        self,
        urls: Sequence[str],
        source: WeightSource,
        *,
        verify_every: int,
        deadline_s: float,
        token: str | None = None,
        host: str = "127.0.0.1",
        bucket_bytes: int | None = None,
        on_confirmed: Callable[[str, int], None] | None = None,
        may_miss: bool = False,
        probe: Probe | None = None,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._may_miss = may_miss and len(urls) > 1
        self._source = source
        self._verify_every = verify_every
        self._deadline_s = deadline_s
        self._host = host
        self._given_bucket_bytes = bucket_bytes
        self.bucket_bytes = bucket_bytes or BUCKET_BYTES
        self._on_confirmed = on_confirmed or (lambda url, version: None)
        self._client = JsonClient(token)
        self._all = {url: WeightServer(url, self._client, limit_s=deadline_s) for url in self._urls}
        self._servers = self._all
        """Those of the push under way."""
        self._group: TransferGroup | None = None
        self._shapes: dict[str, torch.Tensor] = {}
        self._coming: dict[str, torch.Tensor] = {}
        """Those of them that are sent."""
        self._told = UpdateInfo.of({})
        self._aliases: dict[str, str] = {}
        self._unknown: str | None = None
        self._probe = probe
        self._confirmed: int | None = None
        self._pushes = 0
        self._phases, self._tensor = Phases(), ""
        self._waiting: set[str] = set()
        self._paused = False
        self._wrong: set[str] = set()

    @property
    def seconds(self) -> dict[str, float]:
        """What each phase of the last push took. Of `update`: `gather` and `wait` by the trainer, `sent` until it had sent
        everything; what is left is that the servers went on receiving.
        """
        return self._phases.seconds

    async def push(self, version: int) -> None:
        """See `WeightBridge.push`. Errors name the server, the phase and, while tensors are sent, the tensor."""
        what = f"weight push {version} to {len(self._urls)} engine server{'s' * (len(self._urls) > 1)}"
        try:
            async with deadline(self._deadline_s, what):
                await self._push(version)
        except DeadlineError as error:
            silent = await self._give_up() or [url for url in self._urls if url in self._waiting]
            tensor = f", at {self._tensor}" if self._tensor else ""
            who = " and ".join(silent) or "the trainer itself"
            raise DeadlineError(f"{error}; in {self._phases.now}{tensor}, it waited for {who}") from error
        except BaseException as error:
            await self._give_up()
            if isinstance(error, Exception) and not isinstance(error, PolyturnError):
                raise WeightSyncError(f"weight push {version} failed: {type(error).__name__}: {error}") from error
            raise
        self._pushes += 1
        self._confirmed = version

    async def hold(self, version: int) -> None:
        """Nothing: the engine's weights are its own."""

    async def close(self) -> None:
        """Leave the group and close the connections. A later push meets anew."""
        await self._leave()
        await self._client.close()

    # ── phases ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _push(self, version: int) -> None:
        self._phases.begin()
        weights = self._source.weights()
        verify = self._pushes % self._verify_every == 0
        self._wrong = set()
        if self._may_miss:
            verify |= await self._look(version)
        if self._group is None:
            await self._meet(weights, version)
        else:
            check_coverage(weights, self._shapes)
            await self._check_labels(version)
        self._paused = True
        await self._ask_all("pause", "POST", "/pause?mode=keep", version)
        await self._each("start", WeightServer.start, version)
        sums = await self._update(version, verify)
        await self._ask_all("finish", "POST", "/finish_weight_update", version, {"weight_version": str(version)})
        for url, label in zip(self._urls, await self._each("confirm", WeightServer.label, version), strict=True):
            if label != str(version):
                raise WeightSyncError(f"weight push {version} was not confirmed: the engine serves version {label} at {url}")
        if verify and self._unknown is None:
            await self._compare(sums, version)
        await self._forget_prefixes(version)
        for url in self._urls:
            self._on_confirmed(url, version)
        await self._ask_all("resume", "POST", "/resume", version)
        self._at("", ())
        self._paused = False
        if self._unknown is not None and self._probe is not None:
            probe = self._probe
            await self._each(
                "probe", lambda one: probe.check(self._client, one.url, version, limit_s=self._deadline_s), version
            )

    async def _meet(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Learn what the servers' weights look like, refuse what does not fit, and open the group."""
        told = await self._each("meet", WeightServer.describe, version)
        shapes = [one.weights.tensors() for one in told]
        self._unknown = next((one.unknown for one in told if one.unknown is not None), None)
        if self._unknown is not None:
            _log.warning(
                "%s; what the servers hold can't be compared, so they are sent all of the trainer's tensors, and the "
                "log-probabilities of a few tokens are compared after each push",
                self._unknown,
            )
            shapes = [{name: like(tensor) for name, tensor in weights.items()}] * len(told)
        for url, theirs in zip(self._urls, shapes, strict=True):
            check_coverage(weights, theirs)
            if any(theirs[name].dtype != like.dtype for name, like in shapes[0].items()):
                raise WeightSyncError(f"{url} and {self._urls[0]} hold their weights in different types; give them one")
        # The trainer's order is the model's, and the engines' types are what they need.
        self._shapes = {name: shapes[0][name] for name in weights}
        self._aliases = _shared_aliases(weights, told, self._urls)
        self._coming = {name: like for name, like in self._shapes.items() if name not in self._aliases}
        self._told = UpdateInfo.of(self._coming)
        # Whoever pushed before may have ended in the middle of it.
        await self._each("meet", WeightServer.put_back, version)
        sizes = [answer["world_size"] for answer in await self._ask_all("meet", "GET", "/get_world_size", version)]
        on_gpus = all(one.device == "cuda" for one in told) and next(iter(weights.values())).device.type == "cuda"
        device = next(iter(weights.values())).device if on_gpus else torch.device("cpu")
        if on_gpus:
            members = [(url, one.gpus) for url, one in zip(self._urls, told, strict=True)]
            refuse_shared_gpus([("the trainer", [uuid_of(device)]), *members])
        self.bucket_bytes = self._given_bucket_bytes or (NCCL_BUCKET_BYTES if on_gpus else BUCKET_BYTES)
        listener = listen(self._host)
        info = partial(
            InitInfo,
            master_address=self._host,
            master_port=listener.getsockname()[1],
            world_size=1 + sum(sizes),
            packed_buffer_size_bytes=self.bucket_bytes,
            backend="nccl" if on_gpus else "gloo",
            timeout_s=self._deadline_s,
        )
        self._at("meet", self._urls)
        async with TaskSet("the members of the weight transfer group") as tasks:
            joining = tasks.start(
                in_thread(partial(TransferGroup, info(rank_offset=1), device, listener=listener)), "the trainer"
            )
            for place, url in enumerate(self._urls):
                body = {"init_info": info(rank_offset=1 + sum(sizes[:place])).to_json()}
                joins = self._servers[url].ask("POST", "/init_weight_transfer_engine", body)
                tasks.start(self._asking(url, joins, version), url)
        self._group = joining.result()

    async def _look(self, version: int) -> bool:
        """Choose who takes part: whoever can be reached. Whether that changed, or one has the weights of its start again."""
        self._at("look", list(self._all))
        labels: dict[str, str] = {}

        async def look(url: str, server: WeightServer) -> None:
            try:
                async with deadline(LOOK_S, f"{url} to say what it serves"):
                    await server.ask("GET", "/health")
                    labels[url] = str(self._confirmed) if server.kind is None else await server.label()
            except (AskError, WeightSyncError, DeadlineError) as error:
                _log.warning("weight push %d goes without %s: %s", version, url, error)

        await asyncio.gather(*(look(url, server) for url, server in self._all.items()))
        if not labels:
            raise WeightSyncError(f"weight push {version} failed in look: none of {', '.join(self._all)} can be reached")
        there = [url for url in self._all if url in labels]
        anew = [url for url in there if self._confirmed is not None and labels[url] == DEFAULT_LABEL]
        if not anew and there == self._urls:
            return False
        self._urls, self._servers = there, {url: self._all[url] for url in there}
        await self._leave()
        return True

    async def _check_labels(self, version: int) -> None:
        """Every server must still serve what the last push brought: one that does not is another one."""
        for url, label in zip(self._urls, await self._each("check", WeightServer.label, version), strict=True):
            if label != str(self._confirmed):
                raise WeightSyncError(
                    f"{url} serves weights {label!r} before push {version}, and it had confirmed version "
                    f"{self._confirmed}: it was restarted with old weights, or another run pushes to it"
                )

    async def _update(self, version: int, verify: bool) -> dict[str, int]:
        """Send all tensors, while every server receives them. Returns their checksums when asked to verify."""
        assert self._group is not None, "the servers are met before anything is sent"
        sums: dict[str, int] = {}
        told, spent, began = self._told, self.seconds, time.perf_counter()
        sending = partial(
            send,
            self._group,
            self._source,
            self._coming,
            bucket_bytes=self.bucket_bytes,
            until=time.monotonic() + self._deadline_s,
            say=partial(setattr, self, "_tensor"),
            sums=sums if verify else None,
            signed_zeros=all(server.kind != "vllm" for server in self._servers.values()),
            spent=spent,
        )

        async def to_all() -> None:
            try:
                await in_thread(sending)
                spent["sent"] = time.perf_counter() - began
            except TransferError as error:
                await asyncio.sleep(REASON_S)
                raise WeightSyncError(f"weight push {version} failed in update, at {self._tensor}: {error}") from error

        self._at("update", self._urls)
        async with TaskSet("the members of a weight push") as tasks:
            tasks.start(to_all(), "the sender")
            for url, server in self._servers.items():
                tasks.start(self._asking(url, server.update(told, version), version), url)
        self._tensor = ""
        return sums | {alias: sums[name] for alias, name in self._aliases.items() if name in sums}

    async def _compare(self, sums: Mapping[str, int], version: int) -> None:
        errors = []
        for url, theirs in zip(self._urls, await self._each("checksums", WeightServer.checksums, version), strict=True):
            try:
                check_sums(sums, theirs, version, f" at {url}")
            except WeightMismatchError as error:
                self._wrong.add(url)
                errors.append(error)
        if errors:
            raise errors[0]

    async def _forget_prefixes(self, version: int) -> None:
        """Drop keys and values of older weights. Requests that wait start over, since theirs are among them."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        for url, answer in zip(self._urls, await self._ask_all("reset the prefix cache", "POST", path, version), strict=True):
            # Versions of vLLM before 0.32 answer nothing.
            if answer is not None and not answer.get("success", True):
                self._wrong.add(url)
                raise WeightSyncError(
                    f"after push {version} {url} did not reset its prefix cache; it would answer from keys and values of older "
                    "weights"
                )

    # ── asking ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _ask_all(self, phase: str, method: str, path: str, version: int, body: object = None) -> list[Any]:
        return await self._each(phase, lambda server: server.ask(method, path, body), version)

    async def _each(self, phase: str, act: Callable[[WeightServer], Coroutine[Any, Any, T]], version: int) -> list[T]:
        """What every server says, all asked at once."""
        self._at(phase, self._urls)
        async with TaskSet(f"the servers' answers in {phase}") as tasks:
            answers = [tasks.start(self._asking(url, act(one), version), url) for url, one in self._servers.items()]
        return [answer.result() for answer in answers]

    async def _asking(self, url: str, question: Coroutine[Any, Any, T], version: int) -> T:
        try:
            answer = await question
        except AskError as error:
            tensor = f", at {self._tensor}" if self._tensor else ""
            raise WeightSyncError(f"weight push {version} failed in {self._phases.now}{tensor}: {error}") from error
        self._waiting.discard(url)
        return answer

    def _at(self, phase: str, urls: Sequence[str]) -> None:
        self._phases.at(phase)
        self._tensor, self._waiting = "", set(urls)

    async def _give_up(self) -> list[str]:
        """After a failure: leave the group, and resume the servers whose weights are right or who know that theirs are not.

        Returns the servers that say nothing any more.
        """
        paused, self._paused, self._confirmed = self._paused, False, None
        silent: list[str] = []

        async def resume(url: str) -> None:
            server = WeightServer(url, self._client, limit_s=RESUME_S)
            server.kind = self._servers[url].kind
            try:
                async with deadline(RESUME_S, f"{url} to resume"):
                    whole = paused and url not in self._wrong and await server.put_back()
                    await (server.ask("POST", "/resume") if whole else server.ask("GET", "/health"))
            except DeadlineError:
                silent.append(url)
                _log.warning("after a weight push that failed, %s does not answer", url)
            except (AskError, WeightSyncError) as error:
                _log.warning("after a weight push that failed, %s", error)

        await asyncio.gather(self._leave(), *map(resume, self._urls))
        return silent

    async def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await group.leave()


def _address(tensor: torch.Tensor) -> int:
    """Where its numbers lie, those of this rank's shard where it is one."""
    return int(getattr(tensor, "to_local", lambda: tensor)().data_ptr())


def _shared_aliases(weights: Mapping[str, torch.Tensor], told: Sequence[Described], urls: Sequence[str]) -> dict[str, str]:
    """Tensors that are another one on all sides, and need not be sent. Raises WeightSyncError where only a server ties them."""
    for url, one in zip(urls, told, strict=True):
        for alias, name in one.aliases.items():
            if _address(weights[alias]) != _address(weights[name]):
                raise WeightSyncError(f"{url} holds {alias} and {name} as one tensor, and the trainer as two; they'd differ")
    common = [set(one.aliases.items()) for one in told]
    return dict(set.intersection(*common))
