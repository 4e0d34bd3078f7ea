"""How weights travel between processes: a process group of one trainer and its engine servers, and tensors packed in buckets.

Rank 0 of the group sends, the servers' ranks receive. The group meets at a store that the trainer opens; both sides learn
of it, and of the names, types and shapes that will come, over HTTP and as JSON (`InitInfo`, `UpdateInfo`: the keys of vLLM
0.32's `nccl` backend, and two of ours). Nothing is unpickled.

A bucket is bytes: whole tensors one after the other, closed as soon as it holds more than `packed_buffer_size_bytes`. Both
sides cut buckets from the same list by the same rule, so only bytes are sent.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed

from polyturn.errors import DeadlineError, WeightSyncError
from polyturn.processes.threads import in_thread_within
from polyturn.weight_sync.base import WeightSource, checksum

dist: Any = torch.distributed  # most of what is used of it is in no stub
Info = TypeVar("Info")
Backend: TypeAlias = Literal["gloo", "nccl"]

BUCKET_BYTES = 64 << 20
NCCL_BUCKET_BYTES = 256 << 20
"""Between GPUs 64 MiB travel in 0.2 ms, less than it takes to begin a bucket. An embedding is often larger than this."""
NUM_BUFFERS = 2
"""Buckets under way at once: the next one is gathered and packed while one is sent."""
LEAVE_S = 1.0
"""How long leaving a group is waited for."""
_POLL_S = 0.00005


class TransferError(WeightSyncError):
    """A broadcast failed or did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitInfo:
    """What a server needs to join the group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = BUCKET_BYTES
    packed_num_buffers: int = NUM_BUFFERS
    backend: Backend = "gloo"
    timeout_s: float = 60.0
    """Longest that joining, and later one bucket, may take on the server's side."""

    def __post_init__(self) -> None:
        """Raises ValueError for values that no group can have."""
        whole = (self.master_port, self.rank_offset, self.world_size, self.packed_buffer_size_bytes)
        if not isinstance(self.master_address, str) or not all(_is_whole(number) and number > 0 for number in whole):
            raise ValueError(f"init_info needs an address and positive numbers; got {asdict(self)}")
        if self.master_port > 65535 or self.rank_offset >= self.world_size:
            raise ValueError(f"init_info has port {self.master_port} and rank {self.rank_offset} of {self.world_size}")
        if self.packed is not True or self.backend not in ("gloo", "nccl"):
            raise ValueError(f"weights come packed, by gloo or nccl; got packed={self.packed}, backend={self.backend!r}")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < 1e6:
            raise ValueError(f"timeout_s={self.timeout_s!r} is no time that a bucket may take")

    @classmethod
    def from_json(cls, given: object) -> InitInfo:
        """Raises ValueError with a sentence for anything else."""
        return _from_json(cls, given)

    def to_json(self) -> dict[str, Any]:
        """The keys as they travel."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateInfo:
    """What comes, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        """Raises ValueError for what describes no tensors."""
        lists = (self.names, self.dtype_names, self.shapes)
        if not all(isinstance(given, list) for given in lists) or len({len(given) for given in lists}) != 1:
            raise ValueError("names, dtype_names and shapes must be lists of one length")
        if not all(isinstance(name, str) for name in self.names) or len(set(self.names)) != len(self.names):
            raise ValueError("names must be texts, each once")
        for name, dtype, shape in zip(*lists, strict=True):
            if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"{name} has the type {dtype!r}, which is none")
            if not isinstance(shape, list) or not all(_is_whole(size) and size >= 0 for size in shape):
                raise ValueError(f"{name} has the shape {shape!r}, which is none")

    @classmethod
    def from_json(cls, given: object) -> UpdateInfo:
        """Raises ValueError with a sentence for anything else."""
        return _from_json(cls, given)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> UpdateInfo:
        """The description of `tensors`, in their order; meta tensors will do."""
        return cls(
            names=list(tensors),
            dtype_names=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
        )

    def to_json(self) -> dict[str, Any]:
        """The keys as they travel."""
        return asdict(self)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Meta tensors by name: types and shapes, no memory."""
        described = zip(self.names, self.dtype_names, self.shapes, strict=True)
        return {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, dtype, shape in described}


def buckets(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> Iterator[list[str]]:
    """Names of the tensors of each bucket, in order; a bucket is closed once it holds more than `bucket_bytes`."""
    names: list[str] = []
    held = 0
    for name, tensor in tensors.items():
        names.append(name)
        held += num_bytes(tensor)
        if held > bucket_bytes:
            yield names
            names, held = [], 0
    if names:
        yield names


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of its type and whole shape."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the whole tensor."""
    return math.prod(tensor.shape) * tensor.element_size()


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes of `tensors`, one after the other, uint8 on `device`."""
    parts = [tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def unpack(bucket: torch.Tensor, shapes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors like those of `shapes` (meta tensors) from a bucket; views of it where the bytes lie as the type needs."""
    found, start = {}, 0
    for name, like in shapes.items():
        end = start + num_bytes(like)
        raw = bucket[start:end]
        if start % like.element_size():
            raw = raw.clone()
        found[name] = raw.view(like.dtype).view(like.shape)
        start = end
    return found


class TransferGroup:
    """A process group of its own, apart from torch's default one. All of its calls block."""

    def __init__(self, info: InitInfo, device: torch.device, *, listener: socket.socket | None = None) -> None:
        """Join as rank `rank_offset`, or as rank 0 with the store's `listener`. `device` is where buckets will lie.

        Raises TransferError when the others don't come in time, or this torch lacks the backend.
        """
        self.device = device
        self._backend = info.backend
        try:
            self._join(info, listener)
        except (RuntimeError, OSError) as error:
            place = f"{info.master_address}:{info.master_port}"
            raise TransferError(f"the weight transfer group at {place} was not joined: {_first_line(error)}") from None

    def _join(self, info: InitInfo, listener: socket.socket | None) -> None:
        rank = 0 if listener is not None else info.rank_offset
        limit = timedelta(seconds=info.timeout_s)
        self._store: Any = dist.TCPStore(
            info.master_address,
            info.master_port,
            info.world_size,
            listener is not None,
            limit,
            wait_for_workers=False,
            # Bound by us: left to itself a store listens on every interface.
            **({} if listener is None else {"master_listen_fd": listener.detach()}),
        )
        store = dist.PrefixStore("weights", self._store)
        self._group: Any
        if info.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._timeout = limit
            loopback = socket.gethostbyname(info.master_address).startswith("127.")
            make = dist.ProcessGroupGloo
            options._devices = [make.create_device(hostname="127.0.0.1") if loopback else make.create_default_device()]
            self._group = dist.ProcessGroupGloo(store, rank, info.world_size, options)
        elif not dist.is_nccl_available():
            raise RuntimeError("this torch has no NCCL")
        else:
            nccl = dist.ProcessGroupNCCL.Options()
            # Its watchdog ends the whole process when this passes; our own deadlines pass long before.
            nccl._timeout = timedelta(days=7)
            self._group = dist.ProcessGroupNCCL(store, rank, info.world_size, nccl)

    def broadcast(self, bucket: torch.Tensor, limit_s: float) -> Any:
        """Start to send `bucket` (rank 0) or to receive into it. `wait` for what it returns."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if self._backend == "gloo":
            options.timeout = timedelta(seconds=limit_s)
        return self._group.broadcast([bucket], options)

    def wait(self, work: Any, until: float) -> None:
        """Until a broadcast is through, on the device too. Raises RuntimeError when it fails, TimeoutError at `until`."""
        if self._backend == "gloo":
            work.wait()
            return
        # A wait for NCCL would only order streams; and a peer that hangs would hold a synchronise for ever.
        while not work.is_completed():
            if time.monotonic() > until:
                raise TimeoutError("the broadcast did not end in time")
            time.sleep(_POLL_S)
        with torch.cuda.device(self.device):
            work.wait()  # it is through: this orders what the current stream does with the bucket, and waits for nothing

    async def leave(self) -> None:
        """Leave: peers that wait for this rank fail. What hangs here goes on in its thread, until its own deadline."""
        with contextlib.suppress(DeadlineError):
            await in_thread_within(LEAVE_S, "a weight transfer group to be left", self.cut)

    def cut(self) -> None:
        """Leave, and wait for it however long it takes; `leave` is for whoever can't."""
        group, self._group = self._group, None
        if self._backend == "nccl" and group is not None:
            group.abort()
        self._store = None


def send(
    group: TransferGroup,
    source: WeightSource,
    shapes: Mapping[str, torch.Tensor],
    *,
    bucket_bytes: int,
    until: float,
    say: Callable[[str], None],
    sums: dict[str, int] | None = None,
    signed_zeros: bool = True,
    spent: dict[str, float] | None = None,
) -> None:
    """Send every tensor of `shapes` (meta tensors), as the type it has there; blocks. Fills `sums` with their checksums, with
    or without the signs of zeros, and `spent` with the seconds that gathering and packing took, and waiting for the group.

    A bucket is gathered whole before any of it is sent. `say` hears the first tensor of the bucket that is waited for.
    Raises TransferError.
    """
    spent = {} if spent is None else spent
    sent: deque[tuple[str, torch.Tensor, Any]] = deque()
    failure = None

    def wait_for_first() -> None:
        say(sent[0][0])
        with _counted(spent, "wait"):
            group.wait(sent[0][2], until)
        sent.popleft()

    try:
        for names in buckets(shapes, bucket_bytes):
            say(names[0])
            with _counted(spent, "gather"):
                tensors = [tensor.detach().to(shapes[name].dtype) for name, tensor in source.gather(names).items()]
                bucket = pack(tensors, group.device)
            if sums is not None:
                sums.update(
                    (name, checksum(tensor, signed_zeros=signed_zeros)) for name, tensor in zip(names, tensors, strict=True)
                )
            if len(sent) == NUM_BUFFERS:
                wait_for_first()
            if len(bucket):
                sent.append((names[0], bucket, group.broadcast(bucket, until - time.monotonic())))
        while sent:
            wait_for_first()
    except (RuntimeError, TimeoutError) as error:
        failure = _first_line(error)
    finally:
        sent.clear()  # whoever keeps a broadcast keeps the connections open, and the peers waiting
    if failure is not None:
        # Raised here, so that no traceback keeps what the failed call held.
        raise TransferError(failure)


def receive(
    group: TransferGroup,
    shapes: Mapping[str, torch.Tensor],
    load: Callable[[Mapping[str, torch.Tensor]], None],
    *,
    bucket_bytes: int,
    until: float,
) -> None:
    """Receive every tensor of `shapes` (meta tensors) and `load` each bucket; blocks. Raises TransferError."""
    coming: deque[tuple[list[str], torch.Tensor, Any]] = deque()
    cut = buckets(shapes, bucket_bytes)
    failure = None
    try:
        while True:
            while len(coming) < NUM_BUFFERS and (names := next(cut, None)) is not None:
                bucket = torch.empty(sum(num_bytes(shapes[name]) for name in names), dtype=torch.uint8, device=group.device)
                work = group.broadcast(bucket, until - time.monotonic()) if len(bucket) else None
                coming.append((names, bucket, work))
            if not coming:
                break
            if coming[0][2] is not None:
                group.wait(coming[0][2], until)
            names, bucket, work = coming.popleft()
            load(unpack(bucket, {name: shapes[name] for name in names}))
    except (RuntimeError, TimeoutError) as error:
        failure = _first_line(error)
    finally:
        work = None
        coming.clear()
    if failure is not None:
        raise TransferError(failure)


@contextlib.contextmanager
def _counted(spent: dict[str, float], what: str) -> Iterator[None]:
    """Add the seconds of the block."""
    began = time.perf_counter()
    try:
        yield
    finally:
        spent[what] = spent.get(what, 0.0) + time.perf_counter() - began


def listen(host: str) -> socket.socket:
    """A socket for the store of a group, on a free port of `host`. Raises WeightSyncError when that is no address of ours."""
    try:
        return socket.create_server((host, 0), backlog=128)
    except OSError as error:
        raise WeightSyncError(f"weight_sync can't listen on {host} ({error}); give an address of this machine") from error


def _first_line(error: BaseException) -> str:
    """What it says, without the native stack that torch may add."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _from_json(cls: type[Info], given: object) -> Info:
    if not isinstance(given, dict):
        raise ValueError(f"an object is needed, and this is {type(given).__name__}")
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not known here; known: {', '.join(known)}")
    try:
        return cls(**given)
    except TypeError as error:
        raise ValueError(str(error).partition("__() ")[2] or str(error)) from error
