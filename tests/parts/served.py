"""An `hf` engine behind its HTTP server, and the client of it, in one: an engine whose every request goes over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from polyturn.engine.hf import HfEngine
from polyturn.engine.http import HttpEngine
from polyturn.engine.server import EngineServer
from polyturn.types import Completion, SamplingParams

TOKEN = "a-token-for-tests"


async def until(condition: Callable[[], object], what: str = "it") -> None:
    """Wait until `condition` holds."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what} never came")


class Served:
    """Starts `num_servers` servers with its first start; `close` stops them, `stop` closes the client only."""

    def __init__(self, make: Any, *, num_servers: int = 1, **options: Any) -> None:
        self.engines: list[HfEngine] = [make() for _ in range(num_servers)]
        self.servers = [EngineServer(engine, token=TOKEN) for engine in self.engines]
        self.client: HttpEngine | None = None
        self.options = options

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    @property
    def policy_version(self) -> int:
        return 0 if self.client is None else self.client.policy_version

    async def start(self) -> None:
        if self.client is None:
            for server in self.servers:
                await server.start()
            self.client = HttpEngine(self.urls, token=TOKEN, start_deadline_s=30, **self.options)
        await self.client.start()

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, *, session: str | None = None
    ) -> Completion:
        assert self.client is not None
        return await self.client.generate(prompt_ids, sampling, session=session)

    async def stop(self) -> None:
        if self.client is not None:
            await self.client.stop()

    async def close(self) -> None:
        await self.stop()
        for server in self.servers:
            await server.stop()
