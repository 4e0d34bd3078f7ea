"""A few threads for one piece of work, which hold up neither the end of the process nor each other when one of them hangs."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(call: Callable[[Item], Result], items: Iterable[Item], *, threads: int) -> list[Result]:
    """`call` of every item, in their order. The first error is raised, and no further item is begun.

    The threads are daemons and work in the caller's context, so its progress is theirs.
    """
    todo = list(enumerate(items))
    if threads < 2 or len(todo) < 2:
        return [call(item) for _, item in todo]
    waiting: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
    for pair in todo:
        waiting.put(pair)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                number, item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[number] = call(item)
            except BaseException as error:
                errors.append(error)

    team = [
        threading.Thread(target=contextvars.copy_context().run, args=(work,), name="storage", daemon=True)
        for _ in range(min(threads, len(todo)))
    ]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(todo))]
