"""One request to an OpenAI-compatible chat API, tried again where that can help. Standard library only."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from polyturn.errors import EnvironmentSetupError, ResourceError
from polyturn.processes.http_words import is_loopback, pause_s
from polyturn.processes.threads import in_thread

MOST_BYTES = 1 << 20
"""Longest answer that is read."""
LONGEST_WAIT_S = 30.0
_AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504))


class ApiError(Exception):
    """A request that failed. `again` when asking once more may help, after `wait_s` where the server says so."""

    def __init__(self, reason: str, *, again: bool, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.again = again
        self.wait_s = wait_s


class ChatApi:
    """The `chat/completions` of a base URL, with counters of calls and tokens.

    Redirects are not followed, as they would carry the key to another host; loopback addresses are never sent to a proxy.

    Raises:
        EnvironmentSetupError: the URL is no http or https one.
    """

    def __init__(self, url: str, *, key: str | None, timeout_s: float, retries: int) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EnvironmentSetupError(f"url={url!r} is no base of an API; give one such as http://127.0.0.1:8000/v1")
        self.url = f"{url.rstrip('/')}/chat/completions"
        self.num_calls = 0
        self.num_tokens = 0
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._timeout_s = timeout_s
        self._retries = retries
        proxies = urllib.request.ProxyHandler({}) if is_loopback(parts.hostname) else urllib.request.ProxyHandler()
        self._opener = urllib.request.build_opener(proxies, _NoRedirect())

    async def complete(self, request: Mapping[str, Any], before: Callable[[], None]) -> str:
        """The text that comes back. `before` is called before every attempt, to refuse it.

        Raises:
            ResourceError: the server can't be reached, or keeps failing.
            EnvironmentSetupError: the server refuses the request as it is.
        """
        body = json.dumps(request).encode()
        for attempt in range(self._retries + 1):
            before()
            self.num_calls += 1
            try:
                answer = await in_thread(self._post, body)
                return self._text(answer)
            except ApiError as error:
                if not error.again:
                    raise EnvironmentSetupError(f"{self.url} refused the request: {error}; correct url, model or key") from None
                if attempt == self._retries:
                    raise ResourceError(f"{self.url} failed {attempt + 1} times, at last with: {error}") from None
                wait_s = 0.25 * 2**attempt * random.uniform(0.5, 1.5) if error.wait_s is None else error.wait_s
                await asyncio.sleep(min(wait_s, LONGEST_WAIT_S))
        raise AssertionError("the loop above returns or raises")

    def _post(self, body: bytes) -> Any:
        request = urllib.request.Request(self.url, data=body, headers=self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                raw = _limited(response, time.monotonic() + self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                said = " ".join(error.read(2000).decode("utf-8", "replace").split())[:200]
            wait_s = pause_s(error.headers.get("Retry-After"))
            raise ApiError(f"status {error.code} ({said})", again=error.code in _AGAIN, wait_s=wait_s) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ApiError(f"{type(error).__name__}: {reason}", again=True) from None
        try:
            return json.loads(raw)
        except ValueError:
            raise ApiError(f"an answer that is not JSON: {raw[:100]!r}", again=True) from None

    def _text(self, answer: Any) -> str:
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise ApiError(f"an answer without choices[0].message.content: {str(answer)[:100]!r}", again=True) from None
        usage = answer.get("usage")
        total = usage.get("total_tokens") if isinstance(usage, Mapping) else None
        self.num_tokens += total if isinstance(total, int) and total >= 0 else len(str(text)) // 3
        return text if isinstance(text, str) else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow nothing: the redirect then is an HTTPError."""


def _limited(response: Any, end: float) -> bytes:
    """The body of an answer, up to a size and a moment."""
    parts: list[bytes] = []
    size = 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise ApiError(f"an answer of more than {MOST_BYTES:,} bytes", again=False)
        if time.monotonic() > end:
            raise ApiError("an answer that takes longer than timeout_s", again=True)
    return b"".join(parts)
