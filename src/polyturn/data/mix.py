"""Several sources of tasks as one stream, in the proportion of their weights; resumable from one number, as every stream."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from polyturn.data.stream import Curriculum, TaskStream
from polyturn.errors import DataError
from polyturn.types import Task, TaskSource

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: its multiples spread evenly over the numbers of 64 bits."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One source of a mix. Its tasks are named `name/...` and belong to the environment of that name."""

    name: str
    source: TaskSource
    weight: float = 1.0


class MixedStream:
    """Tasks of several sources, each in an order of its own, taken in the proportion of their weights.

    Which source a position belongs to follows from the position and the seed. The golden-ratio sequence that decides it is
    even: over any stretch of n tasks a source's share is off by about log(n) / n at most.

    Raises:
        DataError: two parts of a name, a weight that is not above 0, a part without tasks.
    """

    def __init__(
        self, parts: Sequence[Part], *, seed: int, shuffle: bool = True, curriculum: Curriculum = "none", cursor: int = 0
    ) -> None:
        names = [part.name for part in parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"two parts of data.mix are called {twice[0]!r}; give one another name")
        for part in parts:
            if not part.weight > 0:
                raise DataError(f"data.mix: the weight of {part.name} is {part.weight:g}; give a number above 0")
        self._names = names
        self._streams = [
            TaskStream(part.source, seed=seed, shuffle=shuffle, curriculum=curriculum) if part.source.size != 0 else _none(part)
            for part in parts
        ]
        weights = np.array([part.weight for part in parts])
        # The last bound is left out: whatever lies above the one before belongs to the last part.
        self._bounds = np.floor(np.cumsum(weights / weights.sum())[:-1] * 2.0**64).astype(np.uint64)
        self._offset = random.Random(f"mix/{seed}").getrandbits(64)
        self._cursor = 0
        self._taken = [0] * len(parts)
        self.cursor = cursor

    @property
    def cursor(self) -> int:
        """Tasks taken. Setting it moves every source to its place."""
        return self._cursor

    @cursor.setter
    def cursor(self, position: int) -> None:
        taken = np.zeros(len(self._names), dtype=np.int64)
        for start in range(0, position, _CHUNK):
            taken += np.bincount(self._parts(start, min(start + _CHUNK, position)), minlength=len(taken))
        self._taken = taken.tolist()
        self._cursor = position

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        tasks = []
        for index in self._parts(self._cursor, self._cursor + count).tolist():
            name = self._names[index]
            task = self._streams[index].at(self._taken[index])
            tasks.append(named(name, task))
            self._taken[index] += 1
        self._cursor += count
        return tasks

    def _parts(self, start: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The index of the part that each position from `start` to `end` belongs to."""
        positions = np.arange(start, end, dtype=np.uint64)
        values = positions * np.uint64(_GOLDEN) + np.uint64(self._offset)
        found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.searchsorted(self._bounds, values, side="right")
        return found


class MixedTasks:
    """The tasks of several parts as one `TaskSource`, part after part. A `MixedStream` takes them by weight instead."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    @property
    def size(self) -> int | None:
        """Tasks of all parts together, None when one has no end."""
        sizes = [part.source.size for part in self.parts]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def __getitem__(self, index: int) -> Task:
        if self.size is None:
            index, which = divmod(index, len(self.parts))
            part = self.parts[which]
            size = part.source.size
            return named(part.name, part.source[index if size is None else index % size])
        for part in self.parts:
            size = part.source.size or 0
            if index < size:
                return named(part.name, part.source[index])
            index -= size
        raise IndexError(index)


def named(part: str, task: Task) -> Task:
    """A task under the name of its part, which is also the environment that plays it."""
    return replace(task, id=f"{part}/{task.id}", environment=part)


def _none(part: Part) -> TaskStream:
    raise DataError(f"data.mix: {part.name} has no training tasks; give it a path with rows")
