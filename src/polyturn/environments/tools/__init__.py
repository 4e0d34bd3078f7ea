"""Tools that models call: the calculator, and those that people bring as functions or behind an MCP server."""

from polyturn.environments.tools.toolbox import ToolError

__all__ = ["ToolError"]
