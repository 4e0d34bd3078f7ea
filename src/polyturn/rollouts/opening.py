"""What the siblings of a task begin with, the tools that it announces and its first prompt: made once, and copied for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from polyturn.rendering.renderer import Conversation, PromptDelta

Opened: TypeAlias = tuple[Conversation, PromptDelta]
"""A conversation up to where the model speaks first, and what it has read by then."""


class Opening:
    """The beginning of one task, for all who play it."""

    def __init__(self) -> None:
        self._opened: Opened | None = None
        self._tried: asyncio.Event | None = None

    async def begin(self, make: Callable[[], Awaitable[Opened]]) -> Opened:
        """A conversation of one's own, from what the first who came has made.

        When the first one came to grief, everybody makes their own: a fault stays in its trajectory.
        """
        if self._tried is None:
            self._tried = asyncio.Event()
            try:
                self._opened = await make()
            finally:
                self._tried.set()
        else:
            await self._tried.wait()
        if self._opened is None:
            return await make()
        conversation, delta = self._opened
        return conversation.copy(), delta
