"""The token in front of all of vLLM's routes."""

from __future__ import annotations

import pytest

from polyturn.engine.vllm_guard import Guard
from polyturn.processes.role import TOKEN


async def ask(path: str, header: bytes | None, kind: str = "http") -> list[dict]:
    """What comes back through the guard; the application behind it says `through`."""

    async def application(scope, receive, send):
        await send({"through": scope["path"]})

    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    headers = [] if header is None else [(b"authorization", header)]
    await Guard(application)({"type": kind, "path": path, "headers": headers}, None, send)
    return sent


@pytest.mark.parametrize("path", ["/v1/models", "/collective_rpc", "/pause", "/inference/v1/generate", "/metrics"])
@pytest.mark.parametrize("header", [None, b"Bearer wrong", b"s3cret", b"Bearer s3cret2"])
async def test_without_the_token_nothing_gets_through(monkeypatch, path, header):
    monkeypatch.setenv(TOKEN, "s3cret")
    start, body = await ask(path, header)
    assert start["status"] == 401
    assert body["body"] == b'{"error": "Unauthorized"}'


async def test_with_it_everything_does_and_health_always(monkeypatch):
    monkeypatch.setenv(TOKEN, "s3cret")
    assert await ask("/collective_rpc", b"Bearer s3cret") == [{"through": "/collective_rpc"}]
    assert await ask("/health", None) == [{"through": "/health"}]
    assert await ask("/", None, kind="lifespan") == [{"through": "/"}]


async def test_a_server_without_a_token_asks_for_none(monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    assert await ask("/pause", None) == [{"through": "/pause"}]
