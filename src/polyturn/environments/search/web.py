"""JSON over HTTP for search back ends: tried again where that can help, within one deadline, never answered with a guess."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from polyturn.errors import DeadlineError, EnvironmentSetupError, MissingDependencyError, ResourceError
from polyturn.processes.deadlines import deadline
from polyturn.processes.http_words import is_loopback, pause_s

MOST_BYTES = 16 << 20
"""Longest answer that is read."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
_AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
T = TypeVar("T")


class Again(Exception):
    """An answer that another try may better, after `wait_s` where the server says so."""

    def __init__(self, reason: str, *, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class JsonClient:
    """Requests to one URL. Redirects are not followed, and a loopback address is never sent to a proxy.

    Args:
        url: http or https.
        headers: sent with every request.
        deadline_s: for one answer, pauses and further tries included.

    Raises:
        EnvironmentSetupError: the URL is none.
        MissingDependencyError: httpx is not installed.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, deadline_s: float = 25.0) -> None:
        _import_httpx()
        self.url = checked_url(url)
        self._headers = dict(headers or {})
        self._deadline_s = deadline_s
        self._client: Any = None

    async def start(self) -> None:
        """Open the client in the running loop."""
        if self._client is None:
            httpx = _import_httpx()
            host = urllib.parse.urlsplit(self.url).hostname or ""
            timeout = httpx.Timeout(self._deadline_s)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=timeout, trust_env=not is_loopback(host))

    async def stop(self) -> None:
        """Close it."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def ask(self, read: Callable[[Any], T], **request: Any) -> T:
        """What `read` makes of the JSON that comes back; `read` raises Again for an answer that is none.

        `request` is httpx's: `json` makes it a POST, `params` a GET.

        Raises:
            ResourceError: no good answer within the deadline, however often it was asked.
            EnvironmentSetupError: the server refuses the request as it is.
        """
        end = time.monotonic() + self._deadline_s
        reason, tries = "no answer", 0
        while (left_s := end - time.monotonic()) > 0:
            tries += 1
            wait_s = None
            try:
                async with deadline(left_s, f"an answer of {self.url}"):
                    return read(await self._once(request))
            except Again as again:
                reason, wait_s = str(again), again.wait_s
            except DeadlineError as error:
                reason = f"{reason}, then {error}" if tries > 1 else str(error)
            if wait_s is None:
                wait_s = min(FIRST_PAUSE_S * 2 ** (tries - 1) * random.uniform(0.5, 1.5), LONGEST_PAUSE_S)
            if time.monotonic() + wait_s >= end:
                break
            await asyncio.sleep(wait_s)
        raise ResourceError(f"{self.url} gave no answer in {self._deadline_s:g} s and {tries} tries, at last: {reason}")

    async def _once(self, request: Mapping[str, Any]) -> Any:
        httpx = _import_httpx()
        if self._client is None:
            raise EnvironmentSetupError(f"the client of {self.url} is not open; call start first")
        try:
            async with self._client.stream("POST" if "json" in request else "GET", self.url, **request) as response:
                raw = await _limited(response)
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise Again(f"{type(error).__name__}: {error}") from error
        if response.status_code in _AGAIN:
            raise Again(f"status {response.status_code} ({_said(raw)})", wait_s=pause_s(response.headers.get("Retry-After")))
        if response.status_code != 200:
            raise EnvironmentSetupError(
                f"{self.url} refused the request with status {response.status_code} ({_said(raw)}); correct url or token"
            )
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise Again(f"an answer that is not JSON: {_said(raw)}") from None


def checked_url(url: str) -> str:
    """`url`. Raises EnvironmentSetupError when it is no http or https one, or holds a password."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise EnvironmentSetupError(f"environment.args.url={url!r} is no URL; give one such as http://127.0.0.1:8000/retrieve")
    if parts.username or parts.password:
        raise EnvironmentSetupError("environment.args.url holds a name or password; name a variable in token_env instead")
    return url


def bearer(token_env: str | None) -> dict[str, str]:
    """The header with the token in the variable `token_env`. Raises EnvironmentSetupError when that is unset."""
    if token_env is None:
        return {}
    token = os.environ.get(token_env, "").strip()
    if not token:
        raise EnvironmentSetupError(f"environment.args.token_env={token_env}, and that variable is unset; set it to the token")
    return {"Authorization": f"Bearer {token}"}


async def _limited(response: Any) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise ResourceError(f"{response.url} answered with more than {MOST_BYTES:,} bytes")
    return b"".join(parts)


def _said(raw: bytes) -> str:
    return " ".join(raw[:1000].decode("utf-8", "replace").split())[:200]


def _import_httpx() -> Any:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise MissingDependencyError("searching over HTTP needs the package httpx; pip install 'polyturn[search]'") from error
    return httpx
