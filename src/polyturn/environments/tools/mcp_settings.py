"""`environment.args.mcp`: which server, how it is started or reached, and which of its tools are used."""

from __future__ import annotations

import importlib.metadata
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from polyturn.errors import EnvironmentSetupError, MissingDependencyError, nearest

Sessions = Literal["shared", "per_trajectory"]


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


def require_package() -> None:
    """Raise MissingDependencyError where the package `mcp` is not installed, or too old."""
    try:
        import mcp
    except ModuleNotFoundError as error:
        raise MissingDependencyError("tools of an MCP server need the package mcp; pip install 'polyturn[mcp]'") from error
    if not hasattr(mcp, "Client"):
        raise MissingDependencyError(
            f"tools of an MCP server need mcp 2, and here is {importlib.metadata.version('mcp')}; pip install 'polyturn[mcp]'"
        )
