"""Asks another process of the run, or a server beside it, for JSON over HTTP: with its token, and within a deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from polyturn.processes.deadlines import deadline

KEEP_ALIVE_S = 2.0
"""Idle connections are closed after this: sooner than any server does, so that none is reused while it is being closed."""


class AskError(Exception):
    """A request that was not answered as asked. `status` is None when no answer came at all."""

    def __init__(self, url: str, status: int | None, kind: str, reason: str) -> None:
        super().__init__(f"{url} {reason}")
        self.url = url
        self.status = status
        self.kind = kind
        """What the server calls the error; the name of the client's exception when no answer came."""
        self.reason = reason


class JsonClient:
    """Requests to any number of servers that share one token. Opens with the first request, in the loop that makes it."""

    def __init__(self, token: str | None = None) -> None:
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self,
        method: str,
        url: str,
        body: object = None,
        *,
        limit_s: float,
        headers: Mapping[str, str] | None = None,
        text: bool = False,
    ) -> Any:
        """The JSON of the answer, None for an empty one; with `text` what it says, JSON or not.

        Raises:
            AskError: no connection, an answer that is not 200, or one that is no JSON.
            DeadlineError: no whole answer within `limit_s`.
        """
        if self._session is None:
            # A hundred connections, the default, would hold back a rollout's requests.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with (
                deadline(limit_s, f"{method} {url} to be answered"),
                self._session.request(method, url, json=body, headers={**self._headers, **(headers or {})}) as response,
            ):
                raw = await response.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise AskError(url, None, type(error).__name__, f"can't be reached: {_words(error)}") from error
        if response.status != 200:
            kind, reason = _refusal(raw)
            raise AskError(url, response.status, kind, f"answered {response.status}: {reason}")
        if text:
            return raw.decode("utf-8", "replace")
        try:
            return json.loads(raw) if raw else None
        except (ValueError, RecursionError) as error:
            raise AskError(url, response.status, "ValueError", f"answered what is no JSON: {_words(error)}") from error

    async def close(self) -> None:
        """Close all connections. Safe to call twice; a later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            await asyncio.sleep(0)  # transports close in the next round of the loop


def _refusal(raw: bytes) -> tuple[str, str]:
    """Kind and reason of an answer that is not 200, from the forms that servers use."""
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        return "", raw[:500].decode("utf-8", "replace").strip() or "no reason given"
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("detail", answer))
        if isinstance(error, dict) and "message" in error:
            return str(error.get("type", "")), str(error["message"])
        return "", str(error)
    return "", str(answer)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
