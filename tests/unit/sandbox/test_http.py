"""The client keeps apart who is to blame: the connection, the runner, the token, the program; the server refuses nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from parts.processes import gone, present
from polyturn.errors import ConfigError, DataError, IsolationError, SandboxError
from polyturn.sandbox import http as client
from polyturn.sandbox import protocol
from polyturn.sandbox.base import CaseOutcome, Limits, Line, OutputCase, Program, Tests, TestsResult
from polyturn.sandbox.http import HttpSandbox
from polyturn.sandbox.local import LocalSandbox
from polyturn.sandbox.server import SandboxServer

PROGRAM = Program(source="print(1)")
HELD = {"isolation": [{"name": "no network", "held": True, "how": "there is none", "needed": True}]}
RESULT = {"reason": "ok", "exit_code": 0, "signal": None, "stdout": "1\n", "stderr": "", "seconds": 0.1, "cpu_s": 0.1}


def ok(document: object) -> bytes:
    """An answer with a document in it."""
    body = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def refusal(status: int, error: str) -> bytes:
    """An answer that says why not."""
    return ok({"error": error}).replace(b"200 OK", f"{status} No".encode())


@contextlib.asynccontextmanager
async def runner(*answers: bytes | None | Callable[[], object]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A runner with prepared answers, the last for ever; None closes the connection. Gives its URL and the requests."""
    requests: list[bytes] = []
    left = list(answers)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(
                (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0
            )
            requests.append(head + await reader.readexactly(size))
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer is None:
                writer.transport.abort()
                return
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/sandbox", requests


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client, "_PAUSES_S", (0.01, 0.01, 0.01))


async def started(url: str, **settings: object) -> HttpSandbox:
    sandbox = HttpSandbox(url, **settings)
    await sandbox.start()
    return sandbox


async def test_a_request_as_it_is_sent():
    async with runner(ok(HELD), ok({"result": RESULT})) as (url, requests):
        sandbox = await started(url, token="secret", limits=Limits(wall_s=3))
        assert sandbox.isolation == (Line(name="no network", held=True, how="there is none", needed=True),)
        result = await sandbox.run(Program(source="x", stdin="y", files={"a": b"\xff"}))
        assert result.stdout == "1\n"
    assert requests[0].startswith(b"GET /sandbox/v1/isolation HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in requests[0]
    head, _, body = requests[1].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /sandbox/v1/run HTTP/1.1\r\n")
    sent = json.loads(body)
    assert sent["program"] == {"source": "x", "stdin": "y", "files": {"a": "/w=="}}
    assert sent["limits"]["wall_s"] == 3


async def test_a_lost_connection_is_tried_again():
    async with runner(ok(HELD), None, None, ok({"result": RESULT})) as (url, requests):
        sandbox = await started(url)
        assert (await sandbox.run(PROGRAM)).ok
        assert len(requests) == 4


async def test_not_for_ever():
    async with runner(ok(HELD), None) as (url, requests):
        sandbox = await started(url)
        with pytest.raises(SandboxError, match="can't be reached"):
            await sandbox.run(PROGRAM)
        assert len(requests) == 1 + 4


async def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SandboxError, match=f"127.0.0.1:{port} can't be reached"):
        await started(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (refusal(503, "the pool died"), SandboxError, "failed: the pool died"),
        (refusal(500, ""), SandboxError, "status 500 without a reason"),
        (refusal(404, "nothing here"), SandboxError, "nothing here"),
        (refusal(401, "wrong"), ConfigError, "refused the token .wrong.; set the one it was started with"),
        (refusal(400, "no such field"), DataError, "refused the program: no such field"),
        (refusal(413, "too big"), DataError, "too big"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", SandboxError, "failed"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", SandboxError, "can't be reached"),
        (ok([1]), SandboxError, "failed"),
        (ok({}), SandboxError, "something else than the protocol has"),
        (ok({"result": {**RESULT, "mood": "good"}}), SandboxError, "unknown field 'mood'"),
        (ok({"result": {"reason": "ok"}}), SandboxError, "something else than the protocol has"),
    ],
)
async def test_what_is_answered_is_not_asked_again(answer, error, text):
    async with runner(ok(HELD), answer) as (url, requests):
        sandbox = await started(url)
        with pytest.raises(error, match=text):
            await sandbox.run(PROGRAM)
        assert len(requests) == 2


async def test_a_runner_that_does_not_answer_is_given_up():
    async with runner(ok(HELD), b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n") as (url, _):
        sandbox = await started(url, extra_s=0.2)
        with pytest.raises(SandboxError):
            await sandbox.run(PROGRAM, Limits(wall_s=0.1))


async def test_a_verdict_must_be_whole():
    verdict = protocol.from_verdict(TestsResult(outcomes=(CaseOutcome(status="passed"),), stdout="", stderr="", seconds=0.1))
    async with runner(ok(HELD), ok({"verdict": verdict})) as (url, _):
        sandbox = await started(url)
        assert (await sandbox.run_tests(PROGRAM, Tests(cases=("x",)))).all_passed
        with pytest.raises(SandboxError, match="judged 1 of 2 test cases"):
            await sandbox.run_tests(PROGRAM, Tests(cases=("x", "y")))


async def test_a_runner_without_isolation_is_refused():
    bare = {"isolation": [{"name": "no network", "held": False, "how": "forgotten", "needed": True}]}
    async with runner(ok(bare)) as (url, _):
        with pytest.raises(IsolationError, match=r"no network .forgotten."):
            await started(url)
        await started(url, unsafe=True)


@pytest.mark.parametrize("url", ["runner:80", "ftp://x", "http://", "", "/run/socket"])
def test_a_url_that_is_none(url):
    with pytest.raises(ConfigError, match="must start with http"):
        HttpSandbox(url)


def test_documents_there_and_back():
    program = Program(source="x\ud800", stdin="y", files={"a/b": b"\x00"})
    assert protocol.to_program(json.loads(json.dumps(protocol.from_program(program)))) == program
    tests = Tests(
        cases=("a", OutputCase(stdin="b", stdout="c")), setup="d", entry_points=("e",), classes=("g",), module="f", case_s=1.5
    )
    assert protocol.to_tests(json.loads(json.dumps(protocol.from_tests(tests)))) == tests
    assert protocol.to_limits(json.loads(json.dumps(protocol.from_limits(Limits(wall_s=2))))) == Limits(wall_s=2)
    assert protocol.to_limits(None) is None
    assert protocol.to_program({"source": "x"}) == Program(source="x")


@pytest.mark.parametrize(
    ("read", "document", "text"),
    [
        (protocol.to_program, [], "program is a list"),
        (protocol.to_program, {"sauce": ""}, "unknown field 'sauce'; did you mean source"),
        (protocol.to_program, {}, "source"),
        (protocol.to_program, {"source": 5}, "program.source is a int"),
        (protocol.to_program, {"source": "", "files": {"a": "%"}}, "a file is a string of base64"),
        (protocol.to_program, {"source": "", "files": {"../a": ""}}, "must be relative"),
        (protocol.to_tests, {"cases": "x"}, "tests.cases is a str"),
        (protocol.to_tests, {"cases": [5]}, "tests.cases is a int"),
        (protocol.to_tests, {"cases": [{"stdin": ""}]}, "stdout"),
        (protocol.to_limits, {"wall": 5}, "did you mean wall_s"),
        (protocol.to_limits, {"wall_s": "long"}, "limits"),
    ],
)
def test_documents_that_are_none(read, document, text):
    with pytest.raises((DataError, ConfigError), match=text):
        read(document)


@pytest.fixture
async def served() -> AsyncIterator[tuple[SandboxServer, LocalSandbox]]:
    sandbox = LocalSandbox(Limits(wall_s=60))
    await sandbox.start()
    server = SandboxServer(sandbox, token="right")
    await server.start()
    yield server, sandbox
    await server.stop()
    await sandbox.stop()


async def say(server: SandboxServer, data: bytes) -> tuple[int, dict]:
    """Send bytes, and read the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(data)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def request(method: str, path: str, body: bytes = b"", token: str = "right") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_the_server_refuses_what_is_no_request(served):
    server, _ = served
    assert server.url.startswith("http://127.0.0.1:")
    assert (await say(server, request("POST", "/v1/run", b"{}", token="wrong")))[0] == 401
    assert (await say(server, b"GET /v1/isolation HTTP/1.1\r\n\r\n"))[0] == 401
    assert (await say(server, request("GET", "/v2/run")))[0] == 404
    assert (await say(server, request("DELETE", "/v1/run")))[0] == 404
    assert (await say(server, b"hello\r\n\r\n"))[0] == 400
    assert (await say(server, b"GET / SPDY/3\r\n\r\n"))[0] == 400
    for size in ("-5", "many"):
        head = f"POST /v1/run HTTP/1.1\r\nAuthorization: Bearer right\r\nContent-Length: {size}\r\n\r\n"
        assert (await say(server, head.encode()))[0] == 400
    big = f"POST /v1/run HTTP/1.1\r\nAuthorization: Bearer right\r\nContent-Length: {protocol.MOST_BYTES + 1}\r\n\r\n"
    assert (await say(server, big.encode()))[0] == 413
    for body in (
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"program": 5}',
        b'{"program": {"source": ""}, "limits": {"wall_s": -1}}',
    ):
        status, answer = await say(server, request("POST", "/v1/run", body))
        assert status == 400
        assert answer["error"]
    status, answer = await say(server, request("POST", "/v1/run", b'{"program": {"source": "print(5)"}}'))
    assert (status, answer["result"]["stdout"]) == (200, "5\n")


async def test_a_client_that_leaves_ends_its_program(served):
    server, sandbox = served
    remote = HttpSandbox(server.url, token="right")
    await remote.start()
    await gone(sandbox.pid)
    running = asyncio.ensure_future(remote.run(Program(source="while True: pass"), Limits(wall_s=60)))
    await present(sandbox.pid)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gone(sandbox.pid)


async def test_a_pool_that_breaks_there_is_a_broken_sandbox_here(served):
    server, sandbox = served
    remote = HttpSandbox(server.url, token="right")
    await remote.start()
    await sandbox.stop()
    with pytest.raises(SandboxError, match="call start"):
        await remote.run(PROGRAM)
