"""The tools of an MCP server, over its standard input and output or over streamable HTTP, through the package `mcp`.

    {command: [python, server.py], cwd: servers, env: [API_KEY]}      a process of ours; `env` names variables it may see
    {url: "http://127.0.0.1:8000/mcp", api_key_env: MCP_KEY}

A server that dies, or an error of the transport, raises; a result marked as an error is for the model to read.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polyturn.environments.tools.mcp_connection import CLOSE_DEADLINE_S, Connection
from polyturn.environments.tools.mcp_settings import read_settings, require_package
from polyturn.errors import EnvironmentSetupError, ResourceError, nearest
from polyturn.processes.deadlines import run_with_deadline
from polyturn.rendering.tool_calls import ToolSpec
from polyturn.types import Json

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool:
    """A tool of a server. Its state is the connection that the trajectory uses."""

    spec: ToolSpec
    is_async: bool = True

    def bind(self, state: Any, arguments: Mapping[str, Json]) -> Callable[[], Any]:
        """The call, ready to be made. Raises ValueError for text that can't be sent, which would cost the connection."""
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        return functools.partial(state.call, self.spec.name, dict(arguments))


class McpServer:
    """A server that trajectories call: one connection for all, or one each.

    Raises:
        EnvironmentSetupError: settings that name no server.
        MissingDependencyError: the package `mcp` is not installed, or too old.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = read_settings(settings)
        require_package()
        self._tools: tuple[McpTool, ...] | None = None
        self._open: set[Connection] = set()
        self._shared: Connection | None = None
        self._connecting: asyncio.Lock | None = None
        self._reconnected = False

    def tools(self) -> tuple[McpTool, ...]:
        """The tools that the server lists, asked for once over a connection of their own. Blocks.

        Raises:
            ResourceError: the server can't be started or reached.
            EnvironmentSetupError: `allow` names a tool that it does not have.
        """
        if self._tools is None:
            limit_s = self.settings.start_deadline_s + CLOSE_DEADLINE_S
            self._tools = run_with_deadline(lambda: asyncio.run(self._listed()), limit_s, f"the tools of {self.settings.where}")
        return self._tools

    async def start(self) -> None:
        """Open the shared connection, or try one of those to come. Raises as `tools` does, or when the list has changed."""
        self._connecting, self._reconnected = asyncio.Lock(), False
        connection = await self._opened()
        found = self._chosen(connection)
        if self._tools is not None and found != self._tools:
            await self.stop()
            raise EnvironmentSetupError(
                f"{self.settings.where} lists other tools than a moment ago; let it always list the same"
            )
        self._tools = found
        if self.settings.session == "shared":
            self._shared = connection
        else:
            await self.release(connection)

    async def stop(self) -> None:
        """Close every connection. The processes behind them are gone afterwards."""
        self._shared = None
        ended = await asyncio.gather(*(connection.close() for connection in self._open), return_exceptions=True)
        self._open.clear()
        for error in ended:
            if error is not None:
                raise error

    async def current(self, connection: Connection | None) -> Connection:
        """The connection that a trajectory uses, given the one it has. A shared one that was lost is opened again, once a run.

        Raises:
            ResourceError: it can't be opened, or was lost for the second time.
        """
        if self.settings.session == "per_trajectory":
            return connection or await self._opened()
        if self._connecting is None:
            await self.start()  # played by hand, where nobody starts environments
        assert self._connecting is not None, "start makes the lock"
        async with self._connecting:
            if self._shared is None or self._shared.lost:
                if self._shared is not None and self._reconnected:
                    raise ResourceError(f"{self.settings.where} was lost a second time{self._shared.last_words()}")
                self._reconnected = self._shared is not None
                if self._shared is not None:
                    _log.warning("%s was lost%s; connecting again", self.settings.where, self._shared.last_words())
                    await self._closed(self._shared)
                self._shared = await self._opened()
            return self._shared

    async def release(self, connection: Connection) -> None:
        """Close a trajectory's own connection; the shared one stays."""
        if connection is not self._shared and self.settings.session == "per_trajectory":
            await self._closed(connection)

    async def _opened(self) -> Connection:
        connection = Connection(self.settings)
        self._open.add(connection)
        try:
            await connection.open()
        except BaseException:
            self._open.discard(connection)
            raise
        return connection

    async def _closed(self, connection: Connection) -> None:
        await connection.close()
        self._open.discard(connection)

    async def _listed(self) -> tuple[McpTool, ...]:
        connection = Connection(self.settings)
        await connection.open()
        try:
            return self._chosen(connection)
        finally:
            await connection.close()

    def _chosen(self, connection: Connection) -> tuple[McpTool, ...]:
        specs = {spec.name: spec for spec in connection.specs}
        for name in self.settings.allow:
            if name not in specs:
                hint = nearest(name, specs) if specs else "it has none"
                raise EnvironmentSetupError(f"environment.args.mcp.allow: {self.settings.where} has no tool {name!r}; {hint}")
        if not specs:
            raise EnvironmentSetupError(f"{self.settings.where} lists no tools")
        return tuple(McpTool(spec=specs[name]) for name in self.settings.allow or specs)
