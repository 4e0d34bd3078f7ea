"""Makes engine batches repeatable: nobody's turn k is sent before everybody has come to turn k, or has ended."""

from __future__ import annotations

import asyncio


class TurnBarrier:
    """Holds the requests of the `names` given until all of them wait, then lets them go in the order of `names`.

    An engine that batches whatever waits then always sees the same requests in the same order, whatever order the
    environments answered in.
    """

    def __init__(self, names: list[str]) -> None:
        self._order = {name: index for index, name in enumerate(names)}
        self._active = set(names)
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def arrive(self, name: str) -> None:
        """Wait until every active trajectory has arrived."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting[name] = future
        # Not at once: whoever comes last would find its future done, and go before all who are still to be woken.
        loop.call_soon(self._release)
        await future

    def leave(self, name: str) -> None:
        """A trajectory has ended; the others no longer wait for it. Safe to call twice."""
        self._active.discard(name)
        self._waiting.pop(name, None)
        self._release()

    def _release(self) -> None:
        if self._active and self._active <= self._waiting.keys():
            waiting, self._waiting = self._waiting, {}
            for name in sorted(waiting, key=self._order.__getitem__):
                if not waiting[name].done():
                    waiting[name].set_result(None)
