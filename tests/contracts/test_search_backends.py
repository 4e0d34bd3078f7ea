"""Every search back end keeps one contract: over the same passages, through real files and real servers on loopback."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from polyturn.environments.search.base import Passage, SearchBackend
from polyturn.environments.search.bm25 import Bm25
from polyturn.environments.search.http import HttpSearch
from polyturn.environments.search.memory import MemoryIndex
from polyturn.environments.search.server import SearchServer
from polyturn.environments.search.wikipedia import Wikipedia

PASSAGES = [
    Passage(id="11", title="Cleeve Hill", text="The highest point of the Cotswold Hills."),
    Passage(id="12", title="Ben Nevis", text="The highest mountain of Scotland, a hill to some."),
    Passage(id="13", title='The "Hill"', text="A film.\nIt has two lines."),
    Passage(id="14", title="Größe", text="Ein Wort für size, 数."),
]
KINDS = ["memory", *(pytest.param(kind, marks=pytest.mark.real) for kind in ("bm25", "http", "http-own", "wikipedia"))]


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[str]:
    """A server in a thread; gives its base URL."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class MediaWiki(BaseHTTPRequestHandler):
    """Answers as MediaWiki's API does, format version 2: pages in no order, each with its place in `index`."""

    def do_GET(self) -> None:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self.server.asked.append((asked, self.headers))  # type: ignore[attr-defined]
        found = MemoryIndex(PASSAGES).search_now(asked["gsrsearch"], int(asked["gsrlimit"]))
        pages = [
            {"pageid": int(p.id), "ns": 0, "title": p.title, "index": place, "extract": p.text}
            for place, p in enumerate(found, 1)
        ]
        answer = {"batchcomplete": True} | ({"query": {"pages": pages[::-1]}} if pages else {})
        raw = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None: ...


def media_wiki() -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), MediaWiki)
    server.asked = []  # type: ignore[attr-defined]
    return server


@pytest.fixture(params=KINDS)
async def backend(request: pytest.FixtureRequest, tmp_path) -> AsyncIterator[SearchBackend]:
    kind = request.param
    if kind == "memory":
        yield MemoryIndex(PASSAGES)
    elif kind == "bm25":
        rows = [{"id": p.id, "title": p.title, "text": p.text} for p in PASSAGES]
        (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        yield Bm25(tmp_path / "corpus.jsonl", cache=tmp_path / "cache")
    elif kind == "wikipedia":
        with served(media_wiki()) as url:
            yield Wikipedia("tests@example.org", url=f"{url}/w/api.php", pause_s=0, cache=tmp_path / "cache")
    else:
        with served(SearchServer(MemoryIndex(PASSAGES).search_now)) as url:
            yield HttpSearch(f"{url}/search" if kind == "http-own" else url)


@pytest.fixture
async def opened(backend: SearchBackend) -> AsyncIterator[SearchBackend]:
    await backend.start()
    yield backend
    await backend.stop()


async def ids(backend: SearchBackend, query: str, k: int = 3) -> list[str]:
    return [passage.id for passage in await backend.search(query, k)]


async def test_the_best_come_first_and_no_more_than_asked_for(opened):
    assert await ids(opened, "highest hill of the Cotswold Hills") == ["11", "12", "13"]
    assert await ids(opened, "highest hill of the Cotswold Hills", 1) == ["11"]


async def test_a_passage_comes_as_it_is(opened):
    assert list(await opened.search("Cotswold", 3)) == [PASSAGES[0]]
    assert list(await opened.search("size 数", 3)) == [PASSAGES[3]]
    (film,) = await opened.search("film", 3)
    assert film.text == PASSAGES[2].text
    assert film.title.strip('"') == PASSAGES[2].title.strip('"'), "the other form puts titles in quotation marks"


@pytest.mark.parametrize("query", ["zebra", "the of", "?!", "\x00", "'; drop", "a" * 1000, '{"a": [', "naïve\ud7ff"])
async def test_what_is_not_there_is_not_found(opened, query):
    assert await ids(opened, query) == []


async def test_the_same_query_finds_the_same(opened):
    first = await opened.search("highest", 3)
    assert [await opened.search("highest", 3) for _ in range(3)] == [first] * 3


async def test_many_at_once_each_get_their_own(opened):
    queries = ["Cotswold", "Scotland", "film", "size", "zebra"] * 20
    found = await asyncio.gather(*(ids(opened, query) for query in queries))
    assert found == [["11"], ["12"], ["13"], ["14"], []] * 20


async def test_it_can_be_stopped_without_a_start_and_started_again(backend):
    await backend.stop()
    for _ in range(2):
        await backend.start()
        assert await ids(backend, "Scotland") == ["12"]
        await backend.stop()
    await backend.stop()
