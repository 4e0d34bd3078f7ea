"""The order in which training tasks are taken: repeatable from the seed, resumable from one number.

`TaskStream` walks one source; `data.mix` has the stream that walks several.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal, Protocol

from polyturn.data.fields import difficulty_rank
from polyturn.errors import DataError
from polyturn.types import Task, TaskSource

Curriculum = Literal["none", "easy_first"]


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
