"""An MCP server for the tests: `python mcp_server.py [PORT] [stubborn]`, over its standard input without a port."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop", log_level="CRITICAL")
basket: list[str] = []


@server.tool()
def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def put(item: str) -> str:
    """Put an item into the basket."""
    if item == "moon":
        raise ToolError("there is no moon")
    basket.append(item)
    return ",".join(basket)


@server.tool()
def weigh(kilos: float) -> float:
    """Weigh something."""
    return kilos


@server.tool()
def pid() -> str:
    """The number of this process."""
    return str(os.getpid())


@server.tool()
async def slow() -> str:
    """Takes for ever."""
    await asyncio.sleep(3600)
    return ""


@server.tool()
def picture() -> list[Image | str]:
    """A picture and a text."""
    return [Image(data=b"abc", format="png"), "a lamp"]


@server.tool()
def die() -> str:
    """Ends this process."""
    print("the roof fell in", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "late" in sys.argv:
        server.tool(name="late")(lambda: "late")
    ports = [word for word in sys.argv[1:] if word.isdigit()]
    if ports:
        server.run("streamable-http", port=int(ports[0]))
    else:
        server.run("stdio")
        if "stubborn" in sys.argv:
            while True:
                signal.pause()
