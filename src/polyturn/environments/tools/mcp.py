"""The tools of an MCP server, over its standard input and output or over streamable HTTP, through the package `mcp`.

    {command: [python, server.py], cwd: servers, env: [API_KEY]}      a process of ours; `env` names variables it may see
    {url: "http://127.0.0.1:8000/mcp", api_key_env: MCP_KEY}

A connection is opened, held and closed by a task of its own, since the client's cancel scopes belong to the task that opened
them. A server that dies, or an error of the transport, raises; a result marked as an error is for the model to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import logging
import os
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from polyturn.environments.tools.calls import refuse_bad_schema
from polyturn.environments.tools.stderr import Tail
from polyturn.environments.tools.toolbox import ToolError, as_text
from polyturn.errors import EnvironmentSetupError, MissingDependencyError, PolyturnError, ResourceError, nearest
from polyturn.processes.deadlines import deadline, run_with_deadline
from polyturn.rendering.tool_calls import ToolSpec
from polyturn.types import Json

_log = logging.getLogger(__name__)

Sessions = Literal["shared", "per_trajectory"]
CLOSE_DEADLINE_S = 15.0
"""What a connection may take to end; a server that ignores the end of its input is killed within it."""
MAX_PAGES = 50
READ_TIMEOUT_S = 300.0
"""Of one HTTP answer; calls have a deadline of their own."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
INVALID_PARAMS = -32602
"""The JSON-RPC code of a request whose parameters, here the model's arguments, can't be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`environment.args.mcp`, checked by `read_settings`."""

    command: tuple[str, ...] = ()
    cwd: str | None = None
    env: tuple[str, ...] = ()
    """Names of variables that the server sees besides a few harmless ones, such as PATH."""
    url: str | None = None
    api_key_env: str | None = None
    session: Sessions = "shared"
    allow: tuple[str, ...] = ()
    """Tools to use; all when empty."""
    start_deadline_s: float = 30.0

    @property
    def where(self) -> str:
        """The server in words."""
        return f"the MCP server at {self.url}" if self.url else f"the MCP server {' '.join(self.command)[:100]!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool:
    """A tool of a server. Its state is the connection that the trajectory uses."""

    spec: ToolSpec
    is_async: bool = True

    def bind(self, state: Any, arguments: Mapping[str, Json]) -> Callable[[], Any]:
        """The call, ready to be made."""
        return functools.partial(state.call, self.spec.name, dict(arguments))


class McpServer:
    """A server that trajectories call: one connection for all, or one each.

    Raises:
        EnvironmentSetupError: settings that name no server.
        MissingDependencyError: the package `mcp` is not installed, or too old.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = read_settings(settings)
        _require_package()
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
                await asyncio.sleep(0.1)  # what a dying process wrote arrives
                said = f"{self._settings.where} can't be used: {type(reason).__name__}: {reason}{self.last_words()}"
                self._failure = reason if isinstance(reason, PolyturnError) else ResourceError(said)
        finally:
            self._tail.release()
            self.lost = True
            self._settled.set()


def read_settings(given: Mapping[str, Any]) -> Settings:
    """`environment.args.mcp`. Raises EnvironmentSetupError, naming the key, for what is no server."""
    here = "environment.args.mcp"
    if not isinstance(given, Mapping):
        raise EnvironmentSetupError(f"{here} is {given!r:.60}, not a mapping; give it command or url")
    known = [item.name for item in fields(Settings)]
    for key in given:
        if key not in known:
            raise EnvironmentSetupError(f"{here}.{key} is no key; {nearest(str(key), known)}")
    checked = dict(given)
    for key in ("command", "env", "allow"):
        if key in given:
            value = given[key]
            if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
                raise EnvironmentSetupError(f"{here}.{key}={value!r:.60} must be a list of texts, as in [python, server.py]")
            checked[key] = tuple(value)
    for key in ("cwd", "url", "api_key_env"):
        if given.get(key) is not None and not isinstance(given[key], str):
            raise EnvironmentSetupError(f"{here}.{key}={given[key]!r:.60} must be a text")
    settings = Settings(**checked)
    if bool(settings.command) == bool(settings.url):
        raise EnvironmentSetupError(f"{here} needs command, as in [python, server.py], or url, and takes one of the two")
    if settings.url and urllib.parse.urlsplit(settings.url).scheme not in ("http", "https"):
        raise EnvironmentSetupError(f"{here}.url={settings.url!r} is no http URL; give one such as http://127.0.0.1:8000/mcp")
    if settings.session not in get_args(Sessions):
        raise EnvironmentSetupError(
            f"{here}.session={settings.session!r}; {nearest(str(settings.session), get_args(Sessions))}"
        )
    if not isinstance(given.get("start_deadline_s", 1.0), int | float) or not settings.start_deadline_s > 0:
        raise EnvironmentSetupError(f"{here}.start_deadline_s={settings.start_deadline_s!r} must be above 0")
    for name in (*settings.env, *filter(None, [settings.api_key_env])):
        if not os.environ.get(name):
            raise EnvironmentSetupError(f"{here}: the variable {name} is not set; set it where the run starts")
    return settings


def _require_package() -> None:
    try:
        import mcp
    except ModuleNotFoundError as error:
        raise MissingDependencyError("tools of an MCP server need the package mcp; pip install 'polyturn[mcp]'") from error
    if not hasattr(mcp, "Client"):
        raise MissingDependencyError(
            f"tools of an MCP server need mcp 2, and here is {importlib.metadata.version('mcp')}; pip install 'polyturn[mcp]'"
        )


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
