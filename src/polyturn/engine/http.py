"""The client of engine servers, ours (`hf_server`) and vLLM's: token ids over HTTP to one or several of them.

The first request of a session goes to the server with the fewest requests under way, and later ones to the same server,
which may still hold the keys and values of the earlier turns. What a server that is lost did not answer is asked again of
another one; a seed makes it the same tokens. When none is left, or one refuses, that is an EngineError that names it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polyturn.engine.replicas import Replica, Replicas
from polyturn.engine.wire import GENERATE, SESSION_HEADER, read_answer, read_label, request_body
from polyturn.errors import ConfigError, DeadlineError, EngineError, NonFiniteError
from polyturn.processes.deadlines import deadline
from polyturn.processes.json_http import AskError, JsonClient
from polyturn.processes.tasks import TaskSet
from polyturn.types import Completion, SamplingParams
from polyturn.weight_sync.labels import BROKEN_LABEL, DEFAULT_LABEL, RPC

ASK_S = 10.0
"""Deadline of a small question to a server."""
LOOK_S = 2.0
"""Deadline of the question whether a server that was lost is back."""
LOGPROBS_MODE = "processed_logprobs"
"""vLLM's name for log-probabilities under the temperature."""
_POLL_S = 0.1
_log = logging.getLogger(__name__)


class _LostError(EngineError):
    """A server can answer nothing now; another one may."""


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
        self._replicas = Replicas(urls)
        self._client = JsonClient(token)
        self._start_deadline_s = start_deadline_s
        self._request_deadline_s = request_deadline_s
        self._started = False

    @property
    def policy_version(self) -> int:
        """The least of the versions that the servers confirmed; 0 before they got weights."""
        return self._replicas.version

    def confirmed(self, url: str, version: int, adapter: str | None = None) -> None:
        """Note that the server at `url` said it serves `version`: from now on an older answer of it is an error.

        With `adapter`, requests ask for it by that name.
        """
        self._replicas.confirmed(url, version, adapter)

    async def start(self) -> None:
        """Wait until every server is healthy, and ask each for its context limit and version.

        Raises:
            DeadlineError: a server was not there in time; it is named, with what it said last.
            EngineError: a server refuses the token, or does not speak this protocol.
        """
        try:
            async with TaskSet("the starts of the engine servers") as tasks:
                for server in self._replicas.all:
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
        for lost in self._replicas.to_look_at():
            await self._look(lost)
        tried: dict[str, _LostError] = {}
        while (server := self._replicas.choose(session, without=tried)) is not None:
            try:
                return await self._generate_at(server, prompt_ids, sampling, session)
            except _LostError as error:
                self._replicas.lose(server, str(error))
                _log.warning("%s; no request goes there until it is back", error)
                tried[server.url] = error
        if tried:
            raise EngineError(str(next(reversed(tried.values()))))
        raise EngineError(f"no engine server can answer: {self._replicas.why_none()}")

    async def stop(self) -> None:
        """Close the connections; the servers go on."""
        self._started = False
        await self._client.close()

    async def _generate_at(
        self, server: Replica, prompt_ids: tuple[int, ...], sampling: SamplingParams, session: str | None
    ) -> Completion:
        sampling = _within_context(server, prompt_ids, sampling)
        before, adapter = server.version, server.adapter
        body = request_body(prompt_ids, sampling, version=before or 0, model=adapter)
        headers = None if session is None else {SESSION_HEADER: session}
        server.under_way += 1
        try:
            answer = await self._client.ask(
                "POST", server.url + GENERATE, body, limit_s=self._request_deadline_s, headers=headers
            )
            completion = read_answer(answer, version=before or 0, adapter=adapter)
        except AskError as error:
            if error.kind == NonFiniteError.__name__:
                raise NonFiniteError(f"{server.url}: {error.reason}") from error
            lost = error.status is None or (error.status >= 500 and not await self._is_healthy(server))
            # A server that was restarted has no adapters any more.
            lost |= error.status == 404 and adapter is not None
            raise (_LostError if lost else EngineError)(f"an engine server failed a request: {error}") from error
        except ValueError as error:
            raise EngineError(f"an engine server answered what is no completion: {server.url}: {error}") from error
        finally:
            server.under_way -= 1
        self._refuse_other_weights(server, completion, before)
        server.version = max(server.version or 0, completion.policy_versions[-1])
        return completion

    def _refuse_other_weights(self, server: Replica, completion: Completion, before: int | None) -> None:
        """Raise EngineError for tokens of weights older than the server had confirmed, or newer than any push brought."""
        oldest, newest = min(completion.policy_versions), max(completion.policy_versions)
        if before is not None and oldest < before:
            raise _LostError(
                f"{server.url} sampled with weights of version {oldest} after it had confirmed version {before}: it was "
                "restarted with old weights"
            )
        if self._replicas.newest is not None and newest > self._replicas.newest:
            raise EngineError(
                f"{server.url} sampled with weights of version {newest}, and this run has pushed {self._replicas.newest} at "
                "most: another run pushes to it"
            )

    async def _greet(self, server: Replica) -> None:
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
            server.context_limit = limit if isinstance(limit, int) else None
            server.version = await self._served_version(server, ASK_S)
            await self._refuse_without_token_route(server)
            await self._refuse_raw_logprobs(server)
        except AskError as error:
            raise EngineError(f"an engine server can't be used: {error}") from error
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise EngineError(f"{server.url} does not answer as an engine server does ({error})") from error

    async def _served_version(self, server: Replica, limit_s: float) -> int | None:
        """What it says its weights are; None before it got any. Raises ValueError for a label that no push gave."""
        try:
            label = (await self._client.ask("GET", f"{server.url}/weight_info", limit_s=limit_s))["weight_version"]
        except AskError as error:
            if error.status != 404:
                raise
            # vLLM before 0.28 knows no versions; our extension does, where it is.
            try:
                asked = await self._client.ask("POST", server.url + RPC, {"method": "polyturn_state"}, limit_s=limit_s)
            except AskError as unknown:
                if unknown.status is None:
                    raise
                return None
            label = asked["results"][0]["weight_version"]
        return None if label in (DEFAULT_LABEL, BROKEN_LABEL) else read_label(label)

    async def _refuse_without_token_route(self, server: Replica) -> None:
        """Raise EngineError when the route that takes ids is not there; an empty request is a bad one, where it is."""
        try:
            await self._client.ask("POST", server.url + GENERATE, {}, limit_s=ASK_S)
        except AskError as error:
            if error.status in (403, 404):
                raise EngineError(
                    f"{server.url} takes no token ids ({GENERATE} answered {error.status}); start vLLM with --enable-scale-out"
                ) from error
            if error.status is None or error.status >= 500:
                raise

    async def _refuse_raw_logprobs(self, server: Replica) -> None:
        """Raise EngineError when a server that says so gives log-probabilities of another distribution than it samples from."""
        try:
            told = await self._client.ask("GET", f"{server.url}/server_info?config_format=json", limit_s=ASK_S)
            mode = told["vllm_config"]["model_config"]["logprobs_mode"]
        except (AskError, LookupError, TypeError):
            return  # our own server, an older vLLM, or one outside development mode
        if mode != LOGPROBS_MODE:
            raise EngineError(
                f"{server.url} was started with --logprobs-mode {mode}, which knows nothing of the temperature; start it with "
                f"--logprobs-mode {LOGPROBS_MODE}"
            )

    async def _look(self, server: Replica) -> None:
        """Ask a lost server whether it is back."""
        try:
            await self._client.ask("GET", f"{server.url}/health", limit_s=LOOK_S)
            back = self._replicas.back(server, await self._served_version(server, LOOK_S))
        except (AskError, DeadlineError, LookupError, TypeError, ValueError):
            return
        if back:
            _log.warning("%s is back, with the current weights", server.url)

    async def _is_healthy(self, server: Replica) -> bool:
        try:
            await self._client.ask("GET", f"{server.url}/health", limit_s=LOOK_S)
        except (AskError, DeadlineError):
            return False
        return True


def _within_context(server: Replica, prompt_ids: Sequence[int], sampling: SamplingParams) -> SamplingParams:
    """`sampling` with what the context has left. Raises EngineError when that is nothing."""
    room = None if server.context_limit is None else server.context_limit - len(prompt_ids)
    if room is not None and room < 1:
        raise EngineError(
            f"a prompt of {len(prompt_ids)} ids leaves no room in the context of {server.context_limit} at {server.url}"
        )
    return replace(sampling, max_tokens=room) if room is not None and room < sampling.max_tokens else sampling
