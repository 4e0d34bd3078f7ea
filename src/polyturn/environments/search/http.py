r"""`http`: a retrieval server. Queries of trajectories that search at the same time travel together.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
                    {"result": [[{"document": {"id": "7", "contents": "\"Title\"\ntext"}, "score": 9.1}, ...]]}
    POST /search    {"queries": ["..."], "k": 3}
                    {"results": [[{"id": "7", "title": "Title", "text": "text"}, ...]]}

The first form is what the retrieval servers of Search-R1 and its relatives speak, the second is ours; the path of the URL says
which. `python -m polyturn.environments.search.server` answers both.
"""

from __future__ import annotations

import asyncio
import hashlib
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyturn.environments.search.base import Passage
from polyturn.environments.search.web import Again, JsonClient, bearer, checked_url
from polyturn.errors import ResourceError

DEFAULT_URL = "http://127.0.0.1:8000/retrieve"
MOST_TOGETHER = 64
"""Queries of one request."""
MOST_REQUESTS = 4
"""Requests under way at once."""


class HttpSearch:
    """The server at `url`; a URL without a path means its `/retrieve`. `token_env` names the variable with its token.

    Raises EnvironmentSetupError for a URL or token that can't be used, MissingDependencyError without httpx.
    """

    def __init__(self, url: str | None = None, *, token_env: str | None = None, deadline_s: float = 25.0) -> None:
        parts = urllib.parse.urlsplit(checked_url(url or DEFAULT_URL))
        path = parts.path if parts.path.strip("/") else "/retrieve"
        self.url = urllib.parse.urlunsplit(parts._replace(path=path))
        self._own = path.rstrip("/").endswith("/search")
        self._client = JsonClient(self.url, headers=bearer(token_env), deadline_s=deadline_s)
        self._waiting: list[tuple[str, int, asyncio.Future[Sequence[Passage]]]] = []
        self._senders: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Ask something, so that a server out of reach is known before anything is paid for. Raises as `search` does."""
        await self._client.start()
        try:
            await self._ask(["polyturn"], 1)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Give up what is under way and close the connections."""
        senders = tuple(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        for _, _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        await self._client.stop()

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        """Raises ResourceError when the server gives no answer in time, EnvironmentSetupError when it refuses."""
        future: asyncio.Future[Sequence[Passage]] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, k, future))
        if len(self._senders) < MOST_REQUESTS:
            sender = asyncio.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await future

    async def _send(self) -> None:
        """Send what waits, as many together as one request takes, until nothing does."""
        while self._waiting:
            k = self._waiting[0][1]
            batch = [entry for entry in self._waiting if entry[1] == k][:MOST_TOGETHER]
            self._waiting = [entry for entry in self._waiting if entry not in batch]
            futures = [future for _, _, future in batch]
            try:
                results = await self._ask([query for query, _, _ in batch], k)
            except asyncio.CancelledError:
                for future in futures:
                    future.cancel()
                raise
            except Exception as error:
                for future in futures:
                    if not future.done():
                        future.set_exception(_copy(error))
                continue
            for future, found in zip(futures, results, strict=True):
                if not future.done():
                    future.set_result(found)

    async def _ask(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        if self._own:
            return await self._client.ask(_reader("results", _own_passage, len(queries), k), json={"queries": queries, "k": k})
        body = {"queries": queries, "topk": k, "return_scores": True}
        return await self._client.ask(_reader("result", _document, len(queries), k), json=body)


def _copy(error: Exception) -> Exception:
    """One exception for each that waits: raising the same one in several places mixes up their tracebacks."""
    return type(error)(*error.args) if isinstance(error, ResourceError) else error


def _reader(key: str, passage: Callable[[Any], Passage], num_queries: int, k: int) -> Callable[[Any], list[list[Passage]]]:
    """Reads an answer: a list of passages for each query, under `key`. Raises Again for one of another form."""

    def read(answer: Any) -> list[list[Passage]]:
        try:
            lists = answer[key]
            if not isinstance(lists, list) or len(lists) != num_queries:
                raise Again(f"an answer without {num_queries} lists in {key!r}: {str(answer)[:100]}")
            return [[passage(entry) for entry in entries][:k] for entries in lists]
        except (KeyError, TypeError, ValueError, IndexError):
            raise Again(f"an answer of another form than {{{key!r}: [[...]]}}: {str(answer)[:100]}") from None

    return read


def _own_passage(entry: Mapping[str, Any]) -> Passage:
    return Passage(id=_text(entry["id"]), title=_text(entry["title"]), text=_text(entry["text"]))


def _document(entry: Mapping[str, Any]) -> Passage:
    """A passage in the other form: the title, in quotation marks, is the first line of `contents`."""
    document = entry.get("document", entry)
    contents = document.get("contents")
    if contents is None:
        title, text = _text(document.get("title", "")), _text(document["text"])
    else:
        first, _, text = _text(contents).partition("\n")
        title = first.strip().strip('"')
    known = document.get("id")
    digest = hashlib.sha256(f"{title}\n{text}".encode("utf-8", "replace")).hexdigest()[:16]
    return Passage(id=digest if known is None else str(known), title=title, text=text)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value.encode("utf-8", "replace").decode()
