"""The client of engine servers, ours (`hf_server`) and vLLM's: token ids over HTTP to one or several of them.

The first request of a session goes to the server with the fewest requests under way, and later ones to the same server,
which may still hold the keys and values of the earlier turns. A server that can't be reached, refuses, or has gone back to
older weights is an EngineError that names it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyturn.engine.wire import DEFAULT_LABEL, GENERATE, SESSION_HEADER, read_answer, read_label, request_body
from polyturn.errors import ConfigError, DeadlineError, EngineError, NonFiniteError
from polyturn.processes.deadlines import deadline
from polyturn.processes.json_http import AskError, JsonClient
from polyturn.processes.tasks import TaskSet
from polyturn.types import Completion, SamplingParams

MOST_SESSIONS = 1 << 16
"""Sessions whose server is remembered; beyond them the longest unused are forgotten."""
ASK_S = 10.0
"""Deadline of a small question to a server."""
_POLL_S = 0.1


@dataclass(slots=True)
class _Server:
    url: str
    under_way: int = 0
    version: int | None = None
    """The last version that it confirmed; None until it got weights."""
    context_limit: int | None = None


class HttpEngine:
    """Generates at the servers at `urls`, which others start and stop. `token` is their bearer token.

    A completion that takes longer than `request_deadline_s` is an error, however patient the caller is.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        start_deadline_s: float = 300.0,
        request_deadline_s: float = 600.0,
    ) -> None:
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ConfigError(f"an engine needs the URLs of its servers, such as http://127.0.0.1:8000; got {list(urls)}")
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._client = JsonClient(token)
        self._start_deadline_s = start_deadline_s
        self._request_deadline_s = request_deadline_s
        self._sessions: OrderedDict[str, _Server] = OrderedDict()
        self._started = False

    @property
    def policy_version(self) -> int:
        """The least of the versions that the servers confirmed; 0 before they got weights."""
        return min(server.version or 0 for server in self._servers)

    def confirmed(self, url: str, version: int) -> None:
        """Note that the server at `url` said it serves `version`: from now on an older answer of it is an error."""
        for server in self._servers:
            if server.url == url.rstrip("/"):
                server.version = version

    async def start(self) -> None:
        """Wait until every server is healthy, and ask each for its context limit and version.

        Raises:
            DeadlineError: a server was not there in time; it is named, with what it said last.
            EngineError: a server refuses the token, or does not speak this protocol.
        """
        try:
            async with TaskSet("the starts of the engine servers") as tasks:
                for server in self._servers:
                    tasks.start(self._greet(server), server.url)
        except BaseException:
            await self._client.close()
            raise
        self._started = True

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """See `Engine.generate`. `max_tokens` is cut to what the server's context has left after the prompt."""
        if not self._started:
            raise EngineError("the client of the engine servers is not started")
        if not prompt_ids or sampling.max_tokens < 1:
            raise EngineError(
                f"a request needs a prompt and room for a token; got {len(prompt_ids)} ids, max_tokens={sampling.max_tokens}"
            )
        server = self._server_of(session)
        room = None if server.context_limit is None else server.context_limit - len(prompt_ids)
        if room is not None and room < 1:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} ids leaves no room in the context of {server.context_limit} at {server.url}"
            )
        if room is not None and room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room)
        before = server.version
        server.under_way += 1
        try:
            answer = await self._client.ask(
                "POST",
                server.url + GENERATE,
                request_body(prompt_ids, sampling),
                limit_s=self._request_deadline_s,
                headers=None if session is None else {SESSION_HEADER: session},
            )
            completion = read_answer(answer)
        except AskError as error:
            if error.kind == NonFiniteError.__name__:
                raise NonFiniteError(f"{server.url}: {error.reason}") from error
            raise EngineError(f"an engine server failed a request: {error}") from error
        except ValueError as error:
            raise EngineError(f"an engine server answered what is no completion: {server.url}: {error}") from error
        finally:
            server.under_way -= 1
        _refuse_older(server, completion, before)
        server.version = max(server.version or 0, completion.policy_versions[-1])
        return completion

    async def stop(self) -> None:
        """Close the connections; the servers go on."""
        self._started = False
        await self._client.close()

    def _server_of(self, session: str | None) -> _Server:
        server = None if session is None else self._sessions.get(session)
        if server is None:
            server = min(self._servers, key=lambda one: one.under_way)
        if session is not None:
            self._sessions[session] = server
            self._sessions.move_to_end(session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return server

    async def _greet(self, server: _Server) -> None:
        said = "it was not asked yet"
        try:
            async with deadline(self._start_deadline_s, f"the engine server at {server.url} to be healthy"):
                while True:
                    try:
                        await self._client.ask("GET", f"{server.url}/health", limit_s=self._start_deadline_s)
                        break
                    except AskError as error:
                        if error.status is not None:
                            raise EngineError(f"an engine server is not healthy: {error}") from error
                        said = str(error)
                    await asyncio.sleep(_POLL_S)
        except DeadlineError as error:
            raise DeadlineError(f"{error}; {said}") from error
        try:
            models: Any = await self._client.ask("GET", f"{server.url}/v1/models", limit_s=ASK_S)
            limit = models["data"][0].get("max_model_len")
            label = (await self._client.ask("GET", f"{server.url}/weight_info", limit_s=ASK_S))["weight_version"]
            server.context_limit = limit if isinstance(limit, int) else None
            server.version = None if label == DEFAULT_LABEL else read_label(label)
        except AskError as error:
            raise EngineError(f"an engine server can't be used: {error}") from error
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise EngineError(f"{server.url} does not answer as an engine server does ({error})") from error


def _refuse_older(server: _Server, completion: Completion, before: int | None) -> None:
    """Raise EngineError when tokens are from weights older than those that the server had confirmed before it was asked."""
    oldest = min(completion.policy_versions)
    if before is not None and oldest < before:
        raise EngineError(
            f"{server.url} sampled with weights of version {oldest} after it had confirmed version {before}: it was restarted "
            "with old weights"
        )
