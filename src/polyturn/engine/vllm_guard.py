"""The token of a vLLM server that a run started.

vLLM's own key guards the routes below `/v1` and `/inference` only; whoever reaches the others may replace the weights. This
is put around all of them, as vLLM's `--middleware`, and reads the run's token from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from polyturn.processes.http_words import bears_token
from polyturn.processes.role import TOKEN

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """Answers 401 to every request without the token, `/health` excepted."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN) or None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["path"] == "/health" or bears_token(_authorization(scope), self._token):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})


def _authorization(scope: Message) -> str | None:
    for name, value in scope.get("headers", ()):
        if name == b"authorization":
            return str(value.decode("latin-1"))
    return None
