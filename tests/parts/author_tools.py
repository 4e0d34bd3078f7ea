"""Tools, states and scores as an author would write them, named by the tests as `parts.author_tools:NAME`."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

from polyturn.environments.tools import ToolError

STOCK = {"lamp": 24, "chair": 60}
release = threading.Event()
"""Ends the calls of `stuck`."""


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The other one.
    """
    return a + b


async def price(item: str) -> int:
    """The price of an item, in euros."""
    await asyncio.sleep(0)
    if item not in STOCK:
        raise ToolError(f"there is no {item}")
    return STOCK[item]


def stuck(n: int) -> int:
    """Never comes back by itself."""
    release.wait(30)
    return n


async def slow(n: int) -> int:
    """A coroutine without an end."""
    await asyncio.sleep(3600)
    return n


def make_basket(task):
    return {"task": task.id, "items": []}


def put(state, item: str) -> list[str]:
    """Put an item into the basket."""
    state["items"].append(item)
    return state["items"]


def full(state, task, answer):
    return {"basket": float(state["items"] == [task.answer]), "said": float(answer is not None) / 2}


class Shop:
    """A basket of one trajectory."""

    closed: ClassVar[list[str]] = []

    def __init__(self, task):
        self.wanted = task.answer
        self._basket: list[str] = []

    def put(self, item: str) -> str:
        """Put an item into the basket.

        :param item: its name
        """
        if item not in STOCK:
            raise ToolError(f"there is no {item}")
        self._basket.append(item)
        return f"{len(self._basket)} in the basket"

    async def show(self) -> list[str]:
        """What is in the basket."""
        return self._basket

    def _hidden(self):
        raise AssertionError("no tool")

    def score(self, task):
        return self._basket == [task.answer]

    async def close(self):
        self.closed.append(self.wanted)


class NoTools:
    pass


def unhinted(item) -> str:
    return item


def broken() -> str:
    """Breaks for a reason outside."""
    raise ConnectionError("the shop is closed")
