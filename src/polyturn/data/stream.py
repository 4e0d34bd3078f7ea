"""The order in which training tasks are taken: repeatable from the seed, resumable from one number."""

from __future__ import annotations

import random
from dataclasses import replace

from polyturn.errors import DataError
from polyturn.types import Task, TaskSource


class TaskStream:
    """Tasks of `source`, epoch after epoch, shuffled anew in each from `seed`; a source without end is taken in its order.

    `cursor` counts tasks taken: a stream with the same source, seed and cursor goes on exactly where this one stands.
    """

    def __init__(self, source: TaskSource, *, seed: int, shuffle: bool = True, cursor: int = 0) -> None:
        if source.size == 0:
            raise DataError("there are no training tasks; give data.path a file with rows")
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, list[int]] | None = None
        self.cursor = cursor

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks. From the second epoch on, ids carry the epoch, so that no two tasks of a run share one."""
        tasks = [self._at(self.cursor + offset) for offset in range(count)]
        self.cursor += count
        return tasks

    def _at(self, position: int) -> Task:
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
            self._order = (epoch, order)
        return self._order[1]
