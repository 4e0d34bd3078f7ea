"""One session with an MCP server, through the package `mcp`.

It is opened, held and closed by a task of its own, since the client's cancel scopes belong to the task that opened them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

from polyturn.environments.tools.calls import refuse_bad_schema
from polyturn.environments.tools.mcp_settings import Settings
from polyturn.environments.tools.stderr import Tail
from polyturn.environments.tools.toolbox import ToolError, as_text
from polyturn.errors import PolyturnError, ResourceError
from polyturn.processes.deadlines import deadline
from polyturn.rendering.tool_calls import ToolSpec
from polyturn.types import Json

_log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 15.0
"""What a connection may take to end; a server that ignores the end of its input is killed within it."""
MAX_PAGES = 50
LAST_WORDS_S = 0.2
"""Until what a dying process wrote has come through."""
READ_TIMEOUT_S = 300.0
"""Of one HTTP answer; calls have a deadline of their own."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
INVALID_PARAMS = -32602
"""The JSON-RPC code of a request whose parameters, here the model's arguments, can't be right."""


class Connection:
    """One session with a server, held by a task of its own."""

    def __init__(self, settings: Settings) -> None:
        self.specs: tuple[ToolSpec, ...] = ()
        self.lost = False
        self._settings = settings
        self._client: Any = None
        self._tail = Tail()
        self._settled = asyncio.Event()
        self._end = asyncio.Event()
        self._failure: PolyturnError | None = None
        self._owner: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect and read the list of tools. Raises ResourceError, with what the server wrote at last."""
        settings = self._settings
        self._owner = asyncio.create_task(self._hold(), name=f"connection to {settings.where}")
        try:
            async with deadline(settings.start_deadline_s, f"{settings.where} to answer"):
                await self._settled.wait()
        except BaseException:
            await self.close()
            raise
        if self._failure is not None:
            raise self._failure

    async def call(self, name: str, arguments: dict[str, Json]) -> str:
        """The result of a call as text.

        Raises:
            ToolError: the server marks it as an error, or says that the arguments are wrong.
            ResourceError: the server is gone, or answers against its protocol.
        """
        import mcp_types
        from mcp import MCPError

        if self.lost:
            raise ResourceError(f"{self._settings.where} is lost{self.last_words()}")
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from None
            self.lost = self.lost or error.code == mcp_types.CONNECTION_CLOSED
            await asyncio.sleep(LAST_WORDS_S)
            raise ResourceError(f"{self._settings.where}: {name} failed: {error.message}{self.last_words()}") from error
        except Exception as error:
            self.lost = True
            raise ResourceError(f"{self._settings.where}: {name} failed: {type(error).__name__}: {error}") from error
        text = _text_of(name, result)
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text

    async def close(self) -> None:
        """End the session, and the process behind it. Can be called twice. Raises ResourceError for one that does not end."""
        self._end.set()
        if self._owner is None:
            return
        if not self._settled.is_set():
            self._owner.cancel()
        await asyncio.wait({self._owner}, timeout=CLOSE_DEADLINE_S)
        if not self._owner.done():
            self._owner.cancel()
            await asyncio.wait({self._owner}, timeout=CLOSE_DEADLINE_S)
        if not self._owner.done():
            raise ResourceError(f"{self._settings.where} does not end; look for its process")
        self._tail.close()

    def last_words(self) -> str:
        """End of a sentence: what the server wrote to its error output at last."""
        said = self._tail.text()
        return f"; it wrote {said!r}" if said else ""

    async def _hold(self) -> None:
        """Open, wait for the end, close. What goes wrong is kept, as nobody awaits this task."""
        try:
            async with _client(self._settings, self._tail) as client:
                self._client = client
                self.specs = await _specs(client)
                self._settled.set()
                await self._end.wait()
        except Exception as error:
            reason = _innermost(error)
            if self._settled.is_set() and not self._end.is_set():
                _log.warning("%s was lost: %s: %s", self._settings.where, type(reason).__name__, reason)
            if not self._settled.is_set():
                await asyncio.sleep(LAST_WORDS_S)
                said = f"{self._settings.where} can't be used: {type(reason).__name__}: {reason}{self.last_words()}"
                self._failure = reason if isinstance(reason, PolyturnError) else ResourceError(said)
        finally:
            self._tail.release()
            self.lost = True
            self._settled.set()


@contextlib.asynccontextmanager
async def _client(settings: Settings, tail: Tail) -> AsyncIterator[Any]:
    """A client that has shaken hands with its server."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    async with contextlib.AsyncExitStack() as stack:
        if settings.url is None:
            parameters = StdioServerParameters(
                command=settings.command[0],
                args=list(settings.command[1:]),
                cwd=settings.cwd,
                env={name: os.environ[name] for name in settings.env},
            )
            transport = stdio_client(parameters, errlog=tail.open())
        else:
            transport = streamable_http_client(
                settings.url, http_client=await stack.enter_async_context(_http_client(settings))
            )
        # A server keeps the state of a session by the older handshake only; the newer protocol has no sessions.
        mode = "legacy" if settings.url and settings.session == "per_trajectory" else "auto"
        client = await stack.enter_async_context(Client(transport, mode=mode, cache=None))
        tail.release()
        yield client


def _http_client(settings: Settings) -> Any:
    """An HTTP client with the key, where there is one; a loopback address is never sent to a proxy."""
    import httpx2

    key = os.environ.get(settings.api_key_env) if settings.api_key_env else None
    headers = {"Authorization": f"Bearer {key}"} if key else None
    host = urllib.parse.urlsplit(settings.url or "").hostname or ""
    timeout = httpx2.Timeout(settings.start_deadline_s, read=READ_TIMEOUT_S)
    return httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=host not in LOOPBACK)


async def _specs(client: Any) -> tuple[ToolSpec, ...]:
    """All tools that a server lists. Raises EnvironmentSetupError for a schema that is none."""
    specs: list[ToolSpec] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            spec = ToolSpec(name=tool.name, description=(tool.description or "").strip(), parameters=dict(tool.input_schema))
            refuse_bad_schema(spec)
            specs.append(spec)
        cursor = page.next_cursor
        if cursor is None:
            break
    return tuple(specs)


def _text_of(name: str, result: Any) -> str:
    """The content of a result as one text; what is no text is named."""
    parts = []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) if resource is None else getattr(resource, "text", None)
        parts.append(
            text if isinstance(text, str) else f"[{block.type} {getattr(block, 'mime_type', None) or ''}]".replace(" ]", "]")
        )
    if not parts and result.structured_content is not None:
        return as_text(name, result.structured_content)
    return "\n".join(parts)


def _innermost(error: BaseException) -> BaseException:
    """The first error inside groups of them."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return error
