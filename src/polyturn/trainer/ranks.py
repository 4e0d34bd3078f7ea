"""The ranks of a training run: they sum gradients, compare notes, and hear from rank 0 what to do.

Rank 0 drives. Between two steps the others wait for its next word; while it rolls out it says so every few seconds, so that a
driver that has gone silent is noticed. Numbers of the CPU and all words travel over gloo, gradients of GPUs over NCCL. A
collective that does not come about within its deadline is a RankError that says which one.
"""

from __future__ import annotations

import atexit
import datetime
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyturn.errors import DeadlineError, RankError
from polyturn.trainer import groups
from polyturn.trainer.buckets import in_buckets
from polyturn.trainer.context import Context
from polyturn.trainer.roll_call import RollCall

Waiting: TypeAlias = Callable[[str, float], AbstractContextManager[None]]
"""Notes a wait for others to see, as `Heartbeat.waiting` does."""

_BUCKET_BYTES = 64 << 20
_KEY = "trainer.collective_deadline_s"
_WORDS_PER_DEADLINE = 4
_SPEAK_S = 10.0
"""At least so often: a rank that died is noticed by it too."""
_SILENT_S = 2.0
"""What a word under way may take at the end of a process."""


class Ranks(Protocol):
    """What a trainer asks of its group."""

    rank: int
    size: int

    def sum_in_place(self, tensors: Sequence[Tensor], what: str) -> None:
        """Replace every tensor by its sum over the ranks. Raises RankError."""

    def concatenate(self, tensor_N: Tensor, what: str) -> tuple[Tensor, int]:
        """The ranks' tensors laid end to end, and where this rank's begins. Raises RankError."""

    def gather(self, note: Any, what: str) -> list[Any]:
        """The JSON values of all ranks, in order, on every rank. Raises RankError."""

    def tell(self, word: str, payloads: Sequence[bytes] | None = None) -> AbstractContextManager[None]:
        """From rank 0: one word to each other rank, with a payload of its own. Raises RankError.

        Within what it returns all are at work, and nothing else is said to them.
        """

    def hear(self) -> tuple[str, bytes]:
        """On the other ranks: the next word that is not `wait`, and its payload. Raises RankError."""

    def leave(self) -> None:
        """End the group, without waiting for anybody."""


class Alone:
    """The group of a run with one rank."""

    rank = 0
    size = 1

    def sum_in_place(self, tensors: Sequence[Tensor], what: str) -> None:
        """Nothing to add."""

    def concatenate(self, tensor_N: Tensor, what: str) -> tuple[Tensor, int]:
        """The tensor itself."""
        return tensor_N, 0

    def gather(self, note: Any, what: str) -> list[Any]:
        """The value itself."""
        return [note]

    def tell(self, word: str, payloads: Sequence[bytes] | None = None) -> AbstractContextManager[None]:
        """Nobody listens."""
        return nullcontext()

    def hear(self) -> tuple[str, bytes]:
        """Raises RankError: there is no driver but this rank."""
        raise RankError("a run with one rank has nobody to hear from")

    def leave(self) -> None:
        """There is no group."""


class ProcessRanks:
    """Ranks in processes of their own, joined through the variables that torchrun sets, or within a group that is there."""

    def __init__(
        self,
        *,
        deadline_s: float,
        waiting: Waiting | None = None,
        on_lost: Callable[[RankError], None] | None = None,
        owns_group: bool = False,
    ) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._owns_group = owns_group
        self._on_lost = on_lost or (lambda error: None)
        self._deadline_s = deadline_s
        self._waiting = waiting or (lambda what, seconds: nullcontext())
        with _named(f"a group of all ranks (rank {self.rank} of {self.size})", self._waiting, deadline_s, _KEY):
            limit = datetime.timedelta(seconds=deadline_s)
            self._group = groups.form(lambda: dist.new_group(timeout=limit), deadline_s)
            self._roll = groups.form(lambda: RollCall(self.rank, self.size), deadline_s)
        self._speaking = threading.Lock()
        self._ended = threading.Event()
        if self.rank == 0:
            threading.Thread(target=self._keep_speaking, name="keeps the ranks waiting", daemon=True).start()
            atexit.register(self._fall_silent)

    @classmethod
    def join(
        cls,
        *,
        deadline_s: float,
        start_deadline_s: float,
        waiting: Waiting | None = None,
        on_lost: Callable[[RankError], None] | None = None,
    ) -> ProcessRanks:
        """Join the others. Raises RankError when they don't all come within `start_deadline_s`, or a variable is missing.

        On rank 0 `on_lost` hears, from another thread, when it finds between two steps that a rank is gone.

        Where torch's default group is there already, its ranks are taken, and it is left as it is in the end.
        """
        waiting = waiting or (lambda what, seconds: nullcontext())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        with _named("all ranks to join", waiting, start_deadline_s, "its deadline"):
            owns_group = not dist.is_initialized()
            groups.form(lambda: _meet(backend if owns_group else None, start_deadline_s), start_deadline_s)
        return cls(deadline_s=deadline_s, waiting=waiting, on_lost=on_lost, owns_group=owns_group)

    def leave(self) -> None:
        """See `Ranks.leave`."""
        atexit.unregister(self._fall_silent)
        self._ended.set()
        self._roll.stop()
        with self._speaking:  # the group must not end under a word that is being said
            if dist.is_initialized() and self._owns_group:
                dist.destroy_process_group()

    def mesh(self, device_type: str, shard_ranks: int) -> DeviceMesh:
        """All ranks, where `shard_ranks` is their number; else copies of so many ranks, neighbours. A collective."""
        if shard_ranks == self.size:
            return DeviceMesh.from_group(self._group, device_type)
        return self._mesh(device_type, shard_ranks, ("copies", "shards"))

    def tensor_mesh(self, device_type: str, size: int) -> DeviceMesh:
        """Groups of `size` neighbours that compute layers together (`tensor`), and across them (`shards`). A collective."""
        return self._mesh(device_type, size, ("shards", "tensor"))

    def context(self, size: int) -> Context:
        """The ranks that this one shares rows with: `size` neighbours. A collective of all ranks."""
        return Context(self._group_of(self._places(size)), size, self.rank % size)

    def _mesh(self, device_type: str, size: int, names: tuple[str, str]) -> DeviceMesh:
        places = self._places(size)
        across_and_within = [self._group_of(places.T), self._group_of(places)]
        return DeviceMesh.from_group(across_and_within, device_type, mesh=places, mesh_dim_names=names)

    def _places(self, size: int) -> Tensor:
        """All ranks, `size` neighbours a row."""
        return torch.arange(self.size).reshape(-1, size)

    def _group_of(self, places: Tensor) -> Any:
        """Make a group of each row of `places`, and take that of this rank. A collective."""
        with self._collective(f"groups of {places.shape[1]} ranks"):
            return groups.form(lambda: groups.own(places.tolist(), self.rank, self._deadline_s), self._deadline_s)

    def lost(self, what: str, error: BaseException) -> RankError:
        """What to raise when `what` did not come about because of `error`: it names who is gone, where that can be seen."""
        return _lost(f"{what} (rank {self.rank} of {self.size})", error, self._deadline_s, _KEY, self._roll)

    def sum_in_place(self, tensors: Sequence[Tensor], what: str, *, group: Any = None) -> None:
        """See `Ranks.sum_in_place`; over the ranks of `group` where one is given.

        Sent in buckets, so that many small tensors cost as little as few large ones.
        """
        with self._collective(what):
            for bucket in in_buckets(tensors, _BUCKET_BYTES):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=group or self._group)
                for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def concatenate(self, tensor_N: Tensor, what: str) -> tuple[Tensor, int]:
        """See `Ranks.concatenate`."""
        with self._collective(what):
            lengths = [torch.zeros(1, dtype=torch.int64, device=tensor_N.device) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(tensor_N)], device=tensor_N.device), group=self._group)
            counts = [int(length) for length in lengths]
            # Padded to the longest: an all-gather takes equal shapes.
            padded = tensor_N.new_zeros(max(counts))
            padded[: len(tensor_N)] = tensor_N
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]), sum(counts[: self.rank])

    def gather(self, note: Any, what: str) -> list[Any]:
        """See `Ranks.gather`."""
        own = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8)
        together, _ = self.concatenate(torch.cat([own, torch.tensor([ord("\n")], dtype=torch.uint8)]), what)
        return [json.loads(line) for line in bytes(together.numpy()).splitlines()]

    @contextmanager
    def tell(self, word: str, payloads: Sequence[bytes] | None = None) -> Iterator[None]:
        """See `Ranks.tell`."""
        with self._speaking:
            self._say(word, payloads)
            yield

    def hear(self) -> tuple[str, bytes]:
        """See `Ranks.hear`."""
        while True:
            with self._collective("the driver's next word"):
                word, payload = self._receive().decode(), self._receive()
            if word != "wait":
                return word, payload

    def _say(self, word: str, payloads: Sequence[bytes] | None = None) -> None:
        with self._collective(f"{word!r} to be heard"):
            for rank in range(1, self.size):
                self._send(rank, word.encode())
                self._send(rank, payloads[rank - 1] if payloads else b"")

    def _send(self, rank: int, data: bytes) -> None:
        dist.send(torch.tensor([len(data)]), rank, group=self._group)
        if data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, group=self._group)

    def _receive(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, 0, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        if len(data):
            dist.recv(data, 0, group=self._group)
        return bytes(data.numpy())

    def _fall_silent(self) -> None:
        """At the end of a process that did not `leave`: a thread must not be in the middle of a word then."""
        self._ended.set()
        if self._speaking.acquire(timeout=_SILENT_S):
            self._speaking.release()

    def _keep_speaking(self) -> None:
        while not self._ended.wait(min(_SPEAK_S, self._deadline_s / _WORDS_PER_DEADLINE)):
            try:
                with self._speaking:
                    if self._ended.is_set():
                        return
                    self._say("wait")
            except RankError as error:
                self._on_lost(error)
                return

    def _collective(self, what: str) -> AbstractContextManager[None]:
        return _named(f"{what} (rank {self.rank} of {self.size})", self._waiting, self._deadline_s, _KEY, self._roll)


def _meet(backend: str | None, deadline_s: float) -> None:
    if backend is not None:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=deadline_s))
    dist.barrier()


@contextmanager
def _named(what: str, waiting: Waiting, deadline_s: float, key: str, roll: RollCall | None = None) -> Iterator[None]:
    """Turn what torch raises, when a rank is gone or late, into a RankError that names the wait."""
    try:
        with waiting(what, deadline_s):
            yield
    except (RuntimeError, ValueError, ConnectionError, TimeoutError, DeadlineError) as error:  # torch's own are RuntimeErrors
        raise _lost(what, error, deadline_s, key, roll) from error


def _lost(what: str, error: BaseException, deadline_s: float, key: str, roll: RollCall | None) -> RankError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    first = first.partition(". This is typically caused by")[0]
    gone = roll.missing() if roll is not None else []
    who = f"{' and '.join(gone)} can't be heard any more" if gone else "another rank ended"
    return RankError(f"waited for {what} and lost it: {first}; {who}, or took longer than {key}={deadline_s:g}")
