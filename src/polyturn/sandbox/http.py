"""A sandbox on another machine, reached over HTTP. Whoever speaks the protocol of docs/sandbox.md will do."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, TypeVar

from polyturn.errors import ConfigError, DataError, DeadlineError, SandboxError
from polyturn.processes.deadlines import deadline
from polyturn.processes.threads import in_thread
from polyturn.sandbox import lines, protocol
from polyturn.sandbox.base import Limits, Line, Program, RunResult, Tests, TestsResult

T = TypeVar("T")

CONNECT_S = 10.0
_PAUSES_S = (0.1, 0.5, 2.0)
"""Before each further attempt to connect."""
_log = logging.getLogger(__name__)


class HttpSandbox:
    """Runs programs on the runner at `url`, at most `concurrency` at once.

    An answer may take the program's `wall_s` and `extra_s` more, waiting for its turn there included. A connection that fails
    is tried again three times, which is safe, as a program leaves nothing behind; anything that was answered is not.

    Raises:
        ConfigError: a URL that is none.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        concurrency: int = 32,
        extra_s: float = 120.0,
        unsafe: bool = False,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"sandbox url {url!r} must start with http:// or https:// and name a host")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._token = token
        self._limits = limits or Limits()
        self._extra_s = extra_s
        self._unsafe = unsafe
        self._concurrency = concurrency
        self._turns: asyncio.Semaphore | None = None
        self._isolation: tuple[Line, ...] = ()

    @property
    def isolation(self) -> tuple[Line, ...]:
        """What the runner says holds there, known once started."""
        return self._isolation

    async def start(self) -> None:
        """Ask what holds there. Raises IsolationError when too little does, SandboxError when nobody answers."""
        self._turns = asyncio.Semaphore(self._concurrency)
        answer = await self._ask("GET", protocol.ISOLATION, None, 0.0)
        self._isolation = _understood(protocol.to_lines, answer.get("isolation"))
        lines.insist(self._isolation, unsafe=self._unsafe)

    async def stop(self) -> None:
        """Nothing is held between calls."""
        self._turns = None

    async def run(self, program: Program, limits: Limits | None = None) -> RunResult:
        """Run a program there. Raises SandboxError when the runner can't be reached or broke, DataError when it refuses."""
        limits = limits or self._limits
        body = {"program": protocol.from_program(program), "limits": protocol.from_limits(limits)}
        answer = await self._ask("POST", protocol.RUN, body, limits.wall_s)
        return _understood(protocol.to_result, answer.get("result"))

    async def run_tests(self, program: Program, tests: Tests, limits: Limits | None = None) -> TestsResult:
        """Judge a program there. Raises SandboxError when the runner can't be reached or broke, DataError when it refuses."""
        limits = limits or self._limits
        body = {
            "program": protocol.from_program(program),
            "tests": protocol.from_tests(tests),
            "limits": protocol.from_limits(limits),
        }
        answer = await self._ask("POST", protocol.TESTS, body, limits.wall_s)
        verdict = _understood(protocol.to_verdict, answer.get("verdict"))
        if verdict.total != tests.total:
            raise SandboxError(f"the runner at {self._where} judged {verdict.total} of {tests.total} test cases")
        return verdict

    @property
    def _where(self) -> str:
        return f"{self._host}:{self._port}"

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, wall_s: float) -> dict[str, Any]:
        if self._turns is None:
            raise SandboxError("the sandbox is not started; call start() first")
        data = None if body is None else json.dumps(body).encode()
        async with self._turns:
            try:
                async with deadline(wall_s + self._extra_s, f"the answer of the runner at {self._where}"):
                    status, answer = await self._send(method, path, data, wall_s + self._extra_s)
            except DeadlineError as error:
                raise SandboxError(str(error)) from error
        return self._check(status, answer)

    async def _send(self, method: str, path: str, data: bytes | None, limit_s: float) -> tuple[int, bytes]:
        """One request in a thread; cancelled, it is cut off, so that the runner ends the program."""
        request = _Request(self._connection, limit_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            return await in_thread(request.send, method, self._prefix + path, data, headers)
        except (OSError, http.client.HTTPException) as error:
            raise SandboxError(f"the runner at {self._where} can't be reached: {error or type(error).__name__}") from error
        finally:
            request.cut_off()

    def _connection(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=CONNECT_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_S)

    def _check(self, status: int, answer: bytes) -> dict[str, Any]:
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError):
            document = None
        error = document.get("error", "") if isinstance(document, dict) else ""
        if status == 200 and isinstance(document, dict) and not error:
            return document
        reason = str(error)[:500] or f"status {status} without a reason"
        if status in (401, 403):
            raise ConfigError(f"the runner at {self._where} refused the token ({reason}); set the one it was started with")
        if status in (400, 413, 422):
            raise DataError(f"the runner at {self._where} refused the program: {reason}")
        raise SandboxError(f"the runner at {self._where} failed: {reason}")


class _Request:
    """A request in a thread of its own, which another thread may cut off."""

    def __init__(self, connect: Any, limit_s: float) -> None:
        self._connect = connect
        self._ends = time.monotonic() + limit_s
        self._socket: socket.socket | None = None
        self._cut = threading.Event()

    def send(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        for pause_s in (*_PAUSES_S, None):
            connection = self._connect()
            try:
                connection.connect()
                self._socket = connection.sock
                connection.sock.settimeout(max(0.1, self._ends - time.monotonic()))
                connection.request(method, path, body=data, headers=headers)
                response = connection.getresponse()
                answer = response.read(protocol.MOST_BYTES + 1)
                if len(answer) > protocol.MOST_BYTES:
                    raise http.client.HTTPException(f"an answer of more than {protocol.MOST_BYTES} bytes")
                return response.status, answer
            except ConnectionError as error:
                if pause_s is None or self._cut.is_set():
                    raise
                _log.info("connection to the runner failed (%s); trying again in %g s", error, pause_s)
                self._cut.wait(pause_s)
            finally:
                connection.close()
        raise AssertionError("the last attempt returns or raises")

    def cut_off(self) -> None:
        self._cut.set()
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                return


def _understood(read: Callable[[object], T], document: object) -> T:
    """What an answer says. An answer that is none is the runner's fault, not the program's."""
    try:
        return read(document)
    except DataError as error:
        raise SandboxError(f"the runner answered something else than the protocol has: {error}") from error
