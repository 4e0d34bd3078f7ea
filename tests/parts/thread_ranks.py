"""The group of a trainer's ranks as threads of one process: what several ranks compute, without their processes."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from parts.patience import PATIENCE_S
from polyturn.errors import RankError

Result = TypeVar("Result")


class _Meeting:
    """Where the threads lay down what they bring, and read what all have brought."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.slots: list[Any] = [None] * size
        self.words: list[queue.Queue[tuple[str, bytes]]] = [queue.Queue() for _ in range(size)]

    def exchange(self, rank: int, brought: Any) -> list[Any]:
        try:
            self.slots[rank] = brought
            self.barrier.wait()
            taken = list(self.slots)
            with contextlib.suppress(threading.BrokenBarrierError):  # somebody ends because of what it took here
                self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankError("another rank is gone") from error
        return taken


class ThreadRanks:
    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = len(meeting.slots)

    def sum_in_place(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        everybody = self._meeting.exchange(self.rank, (what, [tensor.clone() for tensor in tensors]))
        assert {other for other, _ in everybody} == {what}, "the ranks are in different places"
        for index, tensor in enumerate(tensors):
            tensor.copy_(sum(brought[index] for _, brought in everybody))

    def concatenate(self, tensor_N: torch.Tensor, what: str) -> tuple[torch.Tensor, int]:
        parts = self._meeting.exchange(self.rank, tensor_N)
        return torch.cat(parts), sum(map(len, parts[: self.rank]))

    def gather(self, note: Any, what: str) -> list[Any]:
        return [json.loads(text) for text in self._meeting.exchange(self.rank, json.dumps(note))]

    @contextlib.contextmanager
    def tell(self, word: str, payloads: Sequence[bytes] | None = None) -> Iterator[None]:
        for rank in range(1, self.size):
            self._meeting.words[rank].put((word, payloads[rank - 1] if payloads else b""))
        yield

    def hear(self) -> tuple[str, bytes]:
        return self._meeting.words[self.rank].get(timeout=PATIENCE_S)

    def leave(self) -> None:
        """Threads just end."""


def on_ranks(size: int, work: Callable[[ThreadRanks], Result]) -> list[Result | BaseException]:
    """Run `work` on every rank and return what each came to, or what it raised, in order.

    Models must be made before: their weights are drawn from one generator that all threads share.
    """
    meeting = _Meeting(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(meeting, rank))
        except BaseException as error:
            results[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
