"""Where the MCP server of the tests is; it can't be imported without the package `mcp`."""

from pathlib import Path

PATH = Path(__file__).with_name("mcp_server.py")
