"""A memory tier's daemon in a thread with a loop of its own, as far from its clients as a process would be."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from polyturn.storage.memory_tier.server import MemoryTierServer


@contextlib.contextmanager
def memory_tier(root: Path, *, capacity_bytes: int = 1 << 30, hyperpod: bool = False) -> Iterator[str]:
    """The URL of a running one, whose token is `secret`."""
    started: list[str] = []
    ready = threading.Event()
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        server = MemoryTierServer(root, token="secret", capacity_bytes=capacity_bytes, hyperpod=hyperpod)
        await server.start()
        started.append(server.url)
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        ready.set()
        await stop.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield f"memory-tier://{started[0]}"
    finally:
        stops[0]()
        thread.join(60)
