"""The order in which training tasks are taken: repeatable from the seed, resumable from one number.

`TaskStream` walks one source, `MixedStream` several by weight. Both have `take` and `cursor`, the number of tasks taken: a
stream built anew with the same arguments and that cursor goes on exactly where this one stands.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from polyturn.data.fields import difficulty_rank
from polyturn.errors import DataError
from polyturn.types import Task, TaskSource

Curriculum = Literal["none", "easy_first"]
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: its multiples spread evenly over the numbers of 64 bits."""
_CHUNK = 1 << 20


class Stream(Protocol):
    """What a training loop takes its tasks from."""

    cursor: int

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks."""


class TaskStream:
    """Tasks of `source`, epoch after epoch, shuffled anew in each from `seed`; a source without end is taken in its order.

    With `curriculum="easy_first"` the first epoch goes from the least `difficulty` of `Task.info` to the greatest, shuffled
    within each; later epochs are shuffled as ever. `cursor` counts tasks taken.

    Raises:
        DataError: no tasks, or a curriculum over tasks that have no difficulty or no end.
    """

    def __init__(
        self, source: TaskSource, *, seed: int, shuffle: bool = True, curriculum: Curriculum = "none", cursor: int = 0
    ) -> None:
        if source.size == 0:
            raise DataError("there are no training tasks; give data.path a file with rows")
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._ranks = _ranks(source) if curriculum == "easy_first" else None
        self._order: tuple[int, list[int]] | None = None
        self.cursor = cursor

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks. From the second epoch on, ids carry the epoch, so that no two tasks of a run share one."""
        tasks = [self.at(self.cursor + offset) for offset in range(count)]
        self.cursor += count
        return tasks

    def at(self, position: int) -> Task:
        """The task at a position of the order, wherever the cursor stands."""
        size = self._source.size
        if size is None:
            return self._source[position]
        epoch, index = divmod(position, size)
        task = self._source[self._permutation(epoch, size)[index]]
        return replace(task, id=f"{task.id}#{epoch + 1}") if epoch else task

    def _permutation(self, epoch: int, size: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(size))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            if self._ranks is not None and epoch == 0:
                order.sort(key=self._ranks.__getitem__)
            self._order = (epoch, order)
        return self._order[1]


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
        self,
        parts: Sequence[Part],
        *,
        seed: int,
        shuffle: bool = True,
        curriculum: Curriculum = "none",
        cursor: int = 0,
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
            tasks.append(replace(task, id=f"{name}/{task.id}", environment=name))
            self._taken[index] += 1
        self._cursor += count
        return tasks

    def _parts(self, start: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The index of the part that each position from `start` to `end` belongs to."""
        positions = np.arange(start, end, dtype=np.uint64)
        values = positions * np.uint64(_GOLDEN) + np.uint64(self._offset)
        found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.searchsorted(self._bounds, values, side="right")
        return found


def _ranks(source: TaskSource) -> list[float]:
    if source.size is None:
        raise DataError("data.curriculum=easy_first orders tasks of a file, and these have no end; set it to none")
    ranks = []
    for index in range(source.size):
        task = source[index]
        rank = difficulty_rank(task.info.get("difficulty"))
        if rank is None:
            raise DataError(
                f"{task.id}: no difficulty that can be ordered ({task.info.get('difficulty')!r}), and "
                "data.curriculum=easy_first orders tasks by it; give every row a number, or easy, medium, hard"
            )
        ranks.append(rank)
    return ranks


def _none(part: Part) -> TaskStream:
    raise DataError(f"data.mix: {part.name} has no training tasks; give it a path with rows")
