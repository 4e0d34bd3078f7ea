"""The server by itself, asked with the standard library."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from contracts.test_search_backends import PASSAGES, served
from parts.patience import PATIENCE_S
from parts.runs import child_environment
from polyturn.environments.search.memory import MemoryIndex
from polyturn.environments.search.server import MOST_BYTES, SearchServer


@pytest.fixture
def ask():
    with served(SearchServer(MemoryIndex(PASSAGES).search_now, token="secret")) as url:

        def ask(method="POST", path="/search", body=b"", token="secret", **headers):
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, {"Authorization": f"Bearer {token}"} | headers)
            answer = connection.getresponse()
            found = answer.status, json.loads(answer.read())
            connection.close()
            return found

        yield ask


def test_both_forms(ask):
    status, found = ask(body={"queries": ["Cotswold", "zebra"], "k": 2})
    text = "The highest point of the Cotswold Hills."
    assert (status, found) == (200, {"results": [[{"id": "11", "title": "Cleeve Hill", "text": text}], []]})
    status, found = ask(path="/retrieve", body={"queries": ["Cotswold"], "topk": 1, "return_scores": True})
    document = {"document": {"id": "11", "contents": f'"Cleeve Hill"\n{text}'}, "score": 1.0}
    assert (status, found) == (200, {"result": [[document]]})
    assert ask("GET", "/health") == (200, {"ok": True})


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"token": "wrong"}, 401),
        ({"token": "sécret".encode("latin-1").decode("latin-1")}, 401),
        ({"path": "/other"}, 404),
        ({"method": "GET", "path": "/search"}, 404),
        ({"body": b"{"}, 400),
        ({"body": b"[" * 100_000}, 400),
        ({"body": []}, 400),
        ({"body": {"queries": "one"}}, 400),
        ({"body": {"queries": [1]}}, 400),
        ({"body": {"queries": ["x"] * 257}}, 400),
        ({"body": {"queries": ["x"], "k": 0}}, 400),
        ({"body": {"queries": ["x"], "k": True}}, 400),
        ({"body": {"queries": ["x"], "k": 101}}, 400),
        ({"body": b"", "Content-Length": str(MOST_BYTES + 1)}, 413),
        ({"body": b"", "Content-Length": "-1"}, 411),
        ({"body": b"", "Content-Length": "\u0661".encode().decode("latin-1")}, 411),
    ],
)
def test_a_request_that_is_none_is_refused_and_the_server_goes_on(ask, request_, status):
    got, found = ask(**request_)
    assert got == status
    assert found["error"]
    assert ask(body={"queries": []})[0] == 200


def test_a_search_that_breaks_is_an_error_of_one_request():
    def search(query, k):
        if query == "break":
            raise RuntimeError("no disk")
        return []

    with served(SearchServer(search)) as url:
        for query, status in (("break", 500), ("go", 200)):
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
            connection.request("POST", "/search", json.dumps({"queries": [query]}))
            assert connection.getresponse().status == status
            connection.close()


@pytest.mark.parametrize("whole", [True, False], ids=["while it is searched for", "in the middle of its request"])
def test_a_client_that_leaves_is_nothing_to_speak_of(capfd, whole):
    left, searches = threading.Event(), []

    def search(query, k):
        searches.append(query)
        assert query == "stays" or left.wait(30)
        return [] if query == "stays" else [replace(PASSAGES[0], text="x" * (8 << 20))]  # more than a socket holds

    server = SearchServer(search)
    ended = threading.Semaphore(0)
    close_request = server.shutdown_request
    server.shutdown_request = lambda request: (close_request(request), ended.release())
    body = json.dumps({"queries": ["leaves"]}).encode()
    head = f"POST /search HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with served(server) as url:
        host, port = url.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        client.sendall(head.encode() + (b"\r\n" + body if whole else b""))
        deadline = time.monotonic() + PATIENCE_S
        while whole and not searches and time.monotonic() < deadline:
            time.sleep(0.01)
        client.close()
        left.set()
        assert ended.acquire(timeout=PATIENCE_S)
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        connection.request("POST", "/search", json.dumps({"queries": ["stays"]}))
        assert json.loads(connection.getresponse().read()) == {"results": [[]]}
        connection.close()
    assert searches == (["leaves", "stays"] if whole else ["stays"])
    assert capfd.readouterr() == ("", "")


def test_the_command_serves_and_refuses():
    command = [sys.executable, "-m", "polyturn.environments.search.server", "--corpus", "builtin:facts", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())
    try:
        line = server.stdout.readline()
        assert line.startswith("serving builtin:facts at http://127.0.0.1:")
        connection = http.client.HTTPConnection(line.split("http://")[1].split("/")[0], timeout=10)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        server.terminate()
        server.communicate(timeout=10)
    refused = subprocess.run(
        [*command, "--token-env", "NOT_SET"],
        capture_output=True,
        text=True,
        env=dict(os.environ) | child_environment(),
        timeout=30,
    )
    assert refused.returncode == 2
    assert "that variable is unset" in refused.stderr
