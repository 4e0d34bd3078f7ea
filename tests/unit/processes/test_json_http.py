"""Questions to a server: every way that an answer can fail to come is told apart, with the address."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from polyturn.errors import DeadlineError
from polyturn.processes.json_http import AskError, JsonClient


@pytest.fixture
async def server():
    async def echo(request):
        body = await request.json() if request.can_read_body else None
        return web.json_response({"token": request.headers.get("Authorization"), "body": body})

    async def answer(request):
        return web.Response(status=int(request.match_info["status"]), body=request.query["body"].encode())

    async def never(request):
        await asyncio.sleep(3600)

    async def half(request):
        request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        request.transport.close()
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/echo", echo), web.post("/echo", echo), web.get("/answer/{status}", answer)])
    app.add_routes([web.get("/never", never), web.get("/half", half)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def client():
    made = JsonClient("secret")
    yield made
    await made.close()
    await made.close()


async def test_token_and_body_travel(server, client):
    assert await client.ask("GET", f"{server}/echo", limit_s=30) == {"token": "Bearer secret", "body": None}
    assert (await client.ask("POST", f"{server}/echo", {"a": [1]}, limit_s=30))["body"] == {"a": [1]}
    bare = JsonClient()
    assert (await bare.ask("GET", f"{server}/echo", limit_s=30))["token"] is None
    await bare.close()


async def test_an_empty_answer_is_none(server, client):
    assert await client.ask("GET", f"{server}/answer/200?body=", limit_s=30) is None


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (500, '{"error": {"message": "no room", "type": "MemoryError"}}', "MemoryError", "answered 500: no room"),
        (401, '{"error": "Unauthorized"}', "", "answered 401: Unauthorized"),
        (422, '{"detail": "a field is missing"}', "", "answered 422: a field is missing"),
        (404, "Not Found", "", "answered 404: Not Found"),
        (503, "", "", "answered 503: no reason given"),
        (500, "[1]", "", r"answered 500: \[1\]"),
        (200, "<html>", "ValueError", "answered what is no JSON"),
    ],
)
async def test_what_is_not_answered_as_asked(server, client, status, body, kind, said):
    with pytest.raises(AskError, match=said) as caught:
        await client.ask("GET", f"{server}/answer/{status}?body={body}", limit_s=30)
    assert (caught.value.status, caught.value.kind) == (status, kind)
    assert caught.value.url in str(caught.value)


async def test_nobody_there_and_a_connection_that_breaks(server, client):
    with pytest.raises(AskError, match=r"http://127\.0\.0\.1:9/x can't be reached") as caught:
        await client.ask("GET", "http://127.0.0.1:9/x", limit_s=30)
    assert caught.value.status is None
    with pytest.raises(AskError, match="can't be reached"):
        await client.ask("GET", f"{server}/half", limit_s=30)


async def test_an_answer_has_a_deadline(server, client):
    with pytest.raises(DeadlineError, match=rf"0\.05 s for GET {server}/never to be answered"):
        await client.ask("GET", f"{server}/never", limit_s=0.05)
