"""The server by itself, asked with the standard library."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys

import pytest

from contracts.test_search_backends import PASSAGES, served
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
