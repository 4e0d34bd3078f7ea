"""Frames that wait to be sent, each until whoever put it there takes it back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Outbox:
    """Frames by the request they belong to, in the order they came; one task sends them, however often its peer is slow.

    It holds one frame a request at most, and none of a request that was given up: so it never outgrows the trajectories
    under way. Requests don't send for themselves because a send that is cancelled half way would spoil the next one's.
    """

    def __init__(self) -> None:
        self._frames: dict[int, bytes] = {}
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, number: int, frame: bytes) -> None:
        """Have the frame of request `number` sent."""
        self._frames[number] = frame
        self._filled.set()

    def withdraw(self, number: int) -> bool:
        """Take back the frame of a request; False when it has been sent, or there is none."""
        return self._frames.pop(number, None) is not None

    async def send_all(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send frames as they come, until cancelled. Raises what `send` raises."""
        while True:
            await self._filled.wait()
            while self._frames:
                await send(self._frames.pop(next(iter(self._frames))))
            self._filled.clear()
