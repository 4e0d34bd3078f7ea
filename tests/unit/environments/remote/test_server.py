"""What a server does with peers that don't keep to the protocol."""

from __future__ import annotations

import contextlib
import json

import aiohttp
import pytest

from parts.environment_processes import TOKEN, served, until
from polyturn.environments.builtin.lookup import Lookup
from polyturn.environments.remote import EnvironmentServer, session, trajectories, wire
from polyturn.environments.remote import server as server_module
from polyturn.environments.remote.wire import PATH
from polyturn.errors import ConfigError


async def talk(server, *frames):
    """What the server says to frames, up to its last word: the end of the connection. A number waits for that answer."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    said = []
    async with aiohttp.ClientSession() as client, client.ws_connect(server.url + PATH, headers=headers) as socket:
        for frame in frames:
            if isinstance(frame, int):
                while not said or said[-1].get("id") != frame:
                    said.append(json.loads(await socket.receive_bytes()))
            else:
                await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
        async for message in socket:
            said.append(json.loads(message.data))
            if message.data == b'{"id":99,"value":null}':
                await socket.close()
        return said, socket.close_code


def frame(number, op, **fields):
    return json.dumps({"id": number, "op": op, **fields}).encode()


TASK = wire.from_task(Lookup(instructions=False).tasks("eval", 0)[0])
LAST = frame(99, "ping")


def test_a_server_needs_a_token():
    with pytest.raises(ConfigError, match="environment-0 has no token"):
        EnvironmentServer(Lookup(), token="")


@pytest.mark.parametrize("header", [None, "", TOKEN, "Bearer", "Bearer x", f"Bearer {TOKEN}x", f"bearer {TOKEN}"])
async def test_requests_without_the_token_are_refused(header):
    headers = {} if header is None else {"Authorization": header}
    with served(Lookup()) as server:
        async with aiohttp.ClientSession() as client, client.get(server.url + PATH, headers=headers) as answer:
            assert answer.status == 401
        async with aiohttp.ClientSession() as client, client.get(server.url) as answer:
            assert answer.status == 404
        assert server.num_open == 0
        assert server.url.startswith("http://127.0.0.1:")


async def test_hello_comes_first_and_pings_are_answered():
    with served(Lookup(), name="environment-7") as server:
        said, _ = await talk(server, LAST)
    hello, pong = said
    assert (hello["name"], hello["environment"], hello["protocol"]) == ("environment-7", "lookup", 1)
    assert pong == {"id": 99, "value": None}


@pytest.mark.parametrize(
    "wrong",
    [
        b"{",
        b"[]",
        b'{"id": 1, "op": "start"}',
        b'{"id": 1, "op": "setup", "task": NaN}',
        "a text",
        b"\xff",
        frame(1, "setup", task=TASK),
    ],
)
async def test_a_frame_that_is_none_ends_the_connection_and_closes_its_states(wrong):
    with served(Lookup()) as server:
        said, code = await talk(server, frame(1, "setup", task=TASK), wrong, LAST)
        assert code == aiohttp.WSCloseCode.POLICY_VIOLATION
        assert [document for document in said if document.get("id") == 99] == []
        await until(lambda: server.num_open == 0, "the close")


async def test_a_frame_that_is_too_large_ends_its_connection_only(monkeypatch):
    monkeypatch.setattr(server_module, "MOST_BYTES", 1 << 20)
    with served(Lookup()) as server:
        with contextlib.suppress(ConnectionError):  # the server hangs up before it has read all of it
            await talk(server, frame(1, "setup", task=TASK), 1, b"x" * ((1 << 20) + 2))
        await until(lambda: server.num_open == 0, "the close")
        said, _ = await talk(server, LAST)
        assert said[-1] == {"id": 99, "value": None}


async def test_trajectories_and_requests_are_bounded(monkeypatch):
    monkeypatch.setattr(trajectories, "MOST_OPEN", 2)
    with served(Lookup()) as server:
        said, _ = await talk(server, *(frame(number, "setup", task=TASK) for number in range(3)), 2, LAST)
        told = {document["id"]: document for document in said[1:]}
        assert (told[0]["value"], told[1]["value"]) == (0, 1)
        assert "2 trajectories are open here, which is the limit of a process" in told[2]["error"]["text"]
        monkeypatch.setattr(session, "MOST_OPEN", 2)
        said, code = await talk(server, *(frame(number, "setup", task=TASK) for number in range(200)), LAST)
        assert code == aiohttp.WSCloseCode.POLICY_VIOLATION


async def test_handles_of_others_and_unknown_requests():
    with served(Lookup()) as server:
        said, _ = await talk(
            server,
            frame(5, "cancel"),
            frame(6, "step", handle=5, reply={"text": "x", "truncated": False, "num_tokens": 0}),
            frame(7, "close", handle=5),
            7,
            LAST,
        )
    assert [document["error"]["text"] for document in said if "error" in document] == ["there is no open trajectory 5 here"] * 2
