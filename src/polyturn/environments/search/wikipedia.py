"""`wikipedia`: the search of a MediaWiki, with the introduction of each article that it finds.

Answers are kept on disk, so that a query is asked once, in this run and in later ones. Requests go out one after the other,
with a pause between them and an address to write to, as Wikimedia's rules for robots ask. It is for trying things out: a
training run asks thousands of times, and wants an index of its own (`bm25`, `http`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn import __version__
from polyturn.environments.search.base import Passage
from polyturn.environments.search.web import Again, JsonClient
from polyturn.errors import EnvironmentSetupError, ResourceError
from polyturn.models.cache import cache_folder
from polyturn.processes.deadlines import deadline

DEFAULT_URL = "https://en.wikipedia.org/w/api.php"
_BUSY = frozenset(("maxlag", "ratelimited", "readonly", "internal_api_error_DBQueryError"))


class Wikipedia:
    """The MediaWiki whose `api.php` is at `url`; English Wikipedia by default.

    Args:
        contact: an e-mail address or page of whoever runs this, sent as part of the User-Agent.
        url: of the API.
        pause_s: least time between two requests.
        deadline_s: for one answer, waiting for those before it included.
        cache: folder of the answers.

    Raises EnvironmentSetupError without a contact or for a bad URL, MissingDependencyError without httpx.
    """

    def __init__(
        self,
        contact: str | None,
        *,
        url: str | None = None,
        pause_s: float = 0.2,
        deadline_s: float = 25.0,
        cache: Path | None = None,
    ) -> None:
        if not contact or not contact.isprintable() or not contact.isascii():
            raise EnvironmentSetupError(
                f"environment.args.contact={contact!r}: Wikimedia wants to know whom to write to; give a mail address or a page"
            )
        headers = {"User-Agent": f"polyturn/{__version__} ({contact}) httpx"}
        self._client = JsonClient(url or DEFAULT_URL, headers=headers, deadline_s=deadline_s)
        self._cache = cache
        self._pause_s = pause_s
        self._deadline_s = deadline_s
        self._free_at = 0.0
        self._turn: asyncio.Lock | None = None

    async def start(self) -> None:
        """Open the client. Raises EnvironmentSetupError for a cache that can't be written to."""
        self._turn = asyncio.Lock()
        try:
            self._folder().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentSetupError(
                f"answers of Wikipedia are kept in {self._folder()}, which can't be made ({error.strerror}); "
                "set POLYTURN_CACHE to a folder of yours"
            ) from error
        await self._client.start()

    async def stop(self) -> None:
        """Close it."""
        await self._client.stop()

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        """Raises ResourceError when no answer comes in time, EnvironmentSetupError when the request is refused."""
        if self._turn is None:
            raise ResourceError("the client of Wikipedia is not open; call start first")
        key = json.dumps([self._client.url, query, k])
        file = self._folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        if (kept := _read(file)) is not None:
            return kept
        async with deadline(self._deadline_s, f"an answer of {self._client.url}"), self._turn:
            if (kept := _read(file)) is not None:  # asked for by another trajectory meanwhile
                return kept
            await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))
            try:
                found = await self._client.ask(_passages, params=_parameters(query, k))
            finally:
                self._free_at = time.monotonic() + self._pause_s
        _write(file, found)
        return found

    def _folder(self) -> Path:
        return (self._cache or cache_folder() / "search") / "wikipedia"


def _parameters(query: str, k: int) -> dict[str, str | int]:
    return {
        "action": "query",
        "format": "json",
        "formatversion": 2,
        "maxlag": 5,
        "generator": "search",
        "gsrsearch": query,
        "gsrlimit": k,
        "prop": "extracts",
        "exintro": 1,
        "explaintext": 1,
        "exlimit": k,
    }


def _passages(answer: Any) -> list[Passage]:
    """The articles of an answer, best first. Raises Again for a busy server, ResourceError for what it can't do."""
    if not isinstance(answer, Mapping):
        raise Again(f"an answer that is no object: {str(answer)[:100]}")
    error = answer.get("error")
    if error is not None:
        code, info = (str(error.get(name)) if isinstance(error, Mapping) else str(error) for name in ("code", "info"))
        if code in _BUSY:
            raise Again(f"{code}: {info[:200]}")
        raise ResourceError(f"Wikipedia can't answer this search: {code}: {info[:200]}")
    try:
        pages = answer.get("query", {}).get("pages", [])
        ordered = sorted(pages, key=lambda page: int(page["index"]))
        return [Passage(id=str(p["pageid"]), title=str(p["title"]), text=str(p.get("extract", ""))) for p in ordered]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Again(f"an answer of another form: {str(answer)[:100]}") from None


def _read(file: Path) -> list[Passage] | None:
    """What was kept; None when nothing was, or when it can't be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [Passage(id=row[0], title=row[1], text=row[2]) for row in json.loads(file.read_text(encoding="utf-8"))]
    return None


def _write(file: Path, found: Sequence[Passage]) -> None:
    """Keep an answer, whole or not at all. A disk that is full costs the next run a request, not this one a trajectory."""
    rows = json.dumps([[passage.id, passage.title, passage.text] for passage in found])
    with contextlib.suppress(OSError):
        handle, draft = tempfile.mkstemp(dir=file.parent, prefix=".")
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(rows)
        Path(draft).replace(file)
