"""Clients against real servers on loopback that fail in every way."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

from contracts.test_search_backends import PASSAGES, media_wiki, served
from polyturn.environments.search import web
from polyturn.environments.search.http import HttpSearch
from polyturn.environments.search.memory import MemoryIndex
from polyturn.environments.search.server import SearchServer
from polyturn.environments.search.web import bearer, checked_url
from polyturn.environments.search.wikipedia import Wikipedia
from polyturn.errors import DeadlineError, EnvironmentSetupError, ResourceError

FOUND = {"results": [[{"id": "1", "title": "Hill", "text": "A hill."}]]}


class Scripted(ThreadingHTTPServer):
    """Answers each request with the next of `answers`, a (status, body, headers), the last one again and again."""

    daemon_threads = True

    def __init__(self, *answers):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.answers, self.asked, self.lock = list(answers), [], threading.Lock()


class _Answers(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(body)

    def do_GET(self):
        self.answer(self.path)

    def answer(self, body):
        with self.server.lock:
            self.server.asked.append((time.monotonic(), body, self.headers))
            answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        if answer is None:  # hang up
            self.close_connection = True
            self.connection.close()
            return
        status, content, headers = answer
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_): ...


GOOD = (200, FOUND, {})


async def found(server: ThreadingHTTPServer, *, deadline_s: float = 5.0, **more):
    """What a search of the server gives, its client started and stopped around it."""
    with served(server) as url:
        backend = HttpSearch(f"{url}/search", deadline_s=deadline_s, **more)
        await backend._client.start()
        try:
            return await backend.search("hill", 3)
        finally:
            await backend.stop()


pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(web, "FIRST_PAUSE_S", 0.01)


BROKEN = [
    (503, {}, {}),
    (429, {}, {"Retry-After": "0"}),
    None,
    (200, b"{", {}),
    (200, {"result": []}, {}),
    (200, {"results": []}, {}),
]
BROKEN += [(200, {"results": [[{"id": "1", "title": "x", "text": None}]]}, {}), (200, [], {}), (200, {"results": [["x"]]}, {})]


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_what_may_get_better_is_asked_again(broken):
    server = Scripted(broken, broken, GOOD)
    assert [passage.title for passage in await found(server)] == ["Hill"]
    assert len(server.asked) == 3


async def test_pauses_grow_and_the_deadline_is_for_all_tries():
    server = Scripted((500, {"error": "no disk"}, {}))
    with pytest.raises(ResourceError, match=r"no answer in 0\.5 s and [3-9] tries, at last: status 500 .*no disk"):
        await found(server, deadline_s=0.5)


async def test_retry_after_is_kept_to():
    server = Scripted((429, {}, {"Retry-After": "0.4"}), GOOD)
    await found(server)
    assert server.asked[1][0] - server.asked[0][0] >= 0.4


async def test_a_pause_longer_than_the_deadline_is_not_waited_for():
    server = Scripted((429, {}, {"Retry-After": "3600"}), GOOD)
    with pytest.raises(ResourceError, match="status 429"):
        await found(server)
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 302])
async def test_a_refusal_is_the_users_to_mend(status):
    server = Scripted((status, {"error": "wrong"}, {"Location": "http://127.0.0.1:1/"}))
    with pytest.raises(EnvironmentSetupError, match=f"status {status} .*wrong"):
        await found(server)
    assert len(server.asked) == 1


async def test_a_server_that_is_not_there_ends_the_start():
    backend = HttpSearch("http://127.0.0.1:9/search", deadline_s=0.3)
    with pytest.raises(ResourceError, match="ConnectError"):
        await backend.start()
    await backend.stop()


async def test_a_server_that_hangs_passes_the_deadline():
    release = threading.Event()

    def search(query, k):
        release.wait(10)
        return []

    try:
        with pytest.raises(ResourceError, match="deadline"):
            await found(SearchServer(search), deadline_s=0.3)
    finally:
        release.set()


async def test_an_endless_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(web, "MOST_BYTES", 10)
    with pytest.raises(ResourceError, match="more than 10 bytes"):
        await found(Scripted(GOOD))


async def test_the_token_goes_along(monkeypatch):
    monkeypatch.setenv("SEARCH_TOKEN", "secret")
    server = Scripted(GOOD)
    await found(server, token_env="SEARCH_TOKEN")
    assert server.asked[0][2]["Authorization"] == "Bearer secret"
    monkeypatch.delenv("SEARCH_TOKEN")
    with pytest.raises(EnvironmentSetupError, match="that variable is unset"):
        bearer("SEARCH_TOKEN")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "file:///etc/passwd", "http://", "http://a:b@127.0.0.1/", "http://[::1", "http://a:99999"]
)
def test_what_is_no_url(url):
    with pytest.raises(EnvironmentSetupError, match=r"environment\.args\.url"):
        checked_url(url)


async def test_queries_that_wait_travel_together_and_one_that_fails_fails_alone():
    seen: list[str] = []

    def search(query: str, k: int):
        seen.append(query)
        if query == "bad":
            raise RuntimeError
        return MemoryIndex(PASSAGES).search_now(query, k)

    with served(SearchServer(search)) as url:
        backend = HttpSearch(url, deadline_s=0.5)
        await backend._client.start()
        good = [asyncio.create_task(backend.search("Cotswold", 1)) for _ in range(40)]
        assert [[p.title for p in found] for found in await asyncio.gather(*good)] == [["Cleeve Hill"]] * 40
        with pytest.raises(ResourceError, match="status 500"):
            await backend.search("bad", 1)
        assert await backend.search("Scotland", 1)
        await backend.stop()


async def test_titles_of_the_other_form():
    documents = [{"contents": '"Hill"\nA hill.\nTwo.'}, {"id": 7, "contents": "no title"}, {"title": "T", "text": "x"}]
    with served(Scripted((200, {"result": [[{"document": d, "score": 1} for d in documents]]}, {}))) as url:
        backend = HttpSearch(url)
        await backend.start()
        found = await backend.search("hill", 3)
        await backend.stop()
    assert [(p.title, p.text) for p in found] == [("Hill", "A hill.\nTwo."), ("no title", ""), ("T", "x")]
    assert found[1].id == "7"
    assert len({p.id for p in found}) == 3


# ── Wikipedia ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def wiki(tmp_path, server, use: Callable, **more):
    with served(server) as url:
        backend = Wikipedia("tests@example.org", url=f"{url}/w/api.php", cache=tmp_path, **{"pause_s": 0.0} | more)
        await backend.start()
        try:
            return await use(backend)
        finally:
            await backend.stop()


async def test_a_query_is_asked_once_with_an_address_to_write_to(tmp_path):
    server = media_wiki()

    async def use(backend):
        return [await backend.search("Cotswold", 2) for _ in range(3)]

    first, *rest = await wiki(tmp_path, server, use)
    assert rest == [first] * 2
    ((asked, headers),) = server.asked
    assert (asked["gsrsearch"], asked["gsrlimit"], asked["prop"], asked["maxlag"]) == ("Cotswold", "2", "extracts", "5")
    assert headers["User-Agent"].startswith("polyturn/")
    assert "(tests@example.org)" in headers["User-Agent"]

    other = media_wiki()
    other.server_close()
    with served(media_wiki()) as url:  # what was kept belongs to the URL
        backend = Wikipedia("tests@example.org", url=f"{url}/w/api.php", cache=tmp_path)
        await backend.start()
        assert await backend.search("Cotswold", 2) == first
        await backend.stop()


async def test_requests_go_out_one_after_the_other_with_a_pause(tmp_path):
    server = Scripted((200, {"batchcomplete": True}, {}))

    async def use(backend):
        await asyncio.gather(*(backend.search(f"q{n}", 1) for n in range(4)))

    await wiki(tmp_path, server, use, pause_s=0.05)
    times = [asked[0] for asked in server.asked]
    assert all(later - earlier >= 0.045 for earlier, later in pairwise(times))


async def test_a_busy_wiki_is_asked_again_and_one_that_refuses_is_a_fault(tmp_path):
    busy = (200, {"error": {"code": "maxlag", "info": "Waiting for a server"}}, {})
    page = {"pageid": 1, "title": "Hill", "index": 1}
    server = Scripted(busy, (200, {"query": {"pages": [page]}}, {}))
    (hill,) = await wiki(tmp_path, server, lambda backend: backend.search("hill", 1))
    assert (hill.title, hill.text) == ("Hill", "")
    wrong = Scripted((200, {"error": {"code": "badvalue", "info": "no such value"}}, {}))
    with pytest.raises(ResourceError, match="badvalue: no such value"):
        await wiki(tmp_path, wrong, lambda backend: backend.search("other", 1))


async def test_a_kept_answer_that_is_damaged_is_asked_for_again(tmp_path):
    server = media_wiki()

    async def use(backend):
        found = await backend.search("Cotswold", 1)
        (kept,) = (tmp_path / "wikipedia").glob("*.json")
        kept.write_text("[[")
        return found == await backend.search("Cotswold", 1)

    assert await wiki(tmp_path, server, use)
    assert len(server.asked) == 2


async def test_waiting_for_others_counts_towards_the_deadline(tmp_path):
    server = Scripted((200, {"batchcomplete": True}, {}))

    async def use(backend):
        return await asyncio.gather(*(backend.search(f"q{n}", 1) for n in range(4)), return_exceptions=True)

    results = await wiki(tmp_path, server, use, pause_s=0.4, deadline_s=0.6)
    assert any(isinstance(result, DeadlineError) for result in results)


@pytest.mark.parametrize("contact", [None, "", "é", "a\nb: c"])
def test_without_someone_to_write_to(contact):
    with pytest.raises(EnvironmentSetupError, match="whom to write to"):
        Wikipedia(contact)
