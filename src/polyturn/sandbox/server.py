"""A small runner: serves one sandbox over HTTP to whoever is on this machine. The reference for the protocol, and its tests.

POLYTURN_SANDBOX_TOKEN=secret python -m polyturn.sandbox.server --port 8808
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from polyturn.errors import DeadlineError, PolyturnError, UserError
from polyturn.processes.deadlines import deadline
from polyturn.processes.http_words import bears_token
from polyturn.sandbox import protocol
from polyturn.sandbox.base import Sandbox
from polyturn.sandbox.local import LocalSandbox

REQUEST_S = 60.0
"""For a request to arrive in full."""
_MOST_HEAD = 1 << 16
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Content Too Large", 503: "Unavailable"}


class SandboxServer:
    """Serves a started sandbox on a port of the loopback interface; port 0 takes a free one, and `port` says which.

    With a `token`, requests must bring it. One request a connection; a client that leaves ends its program.
    """

    def __init__(self, sandbox: Sandbox, *, token: str | None = None, port: int = 0) -> None:
        self._sandbox = sandbox
        self._token = token
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, limit=_MOST_HEAD)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and end whatever is being answered. The sandbox stays as it is."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs every connection in a task"
        self._tasks.add(task)
        try:
            status, answer = await self._answer_or_leave(reader)
            body = json.dumps(answer).encode()
            head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass  # nobody waits for an answer any more
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _answer_or_leave(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
        """The answer to one request; ConnectionError when the client leaves before."""
        try:
            async with deadline(REQUEST_S, "a request to arrive"):
                method, path, headers = await _read_head(reader)
                if not bears_token(headers.get("authorization"), self._token):
                    return 401, {"error": "the bearer token is missing or wrong"}
                size = int(headers.get("content-length", "0"))
                if size > protocol.MOST_BYTES:
                    return 413, {"error": f"a request of {size} bytes; at most {protocol.MOST_BYTES} are taken"}
                body = await reader.readexactly(size)
        except (ValueError, DeadlineError, asyncio.LimitOverrunError) as error:
            return 400, {"error": f"not a request: {error}"}
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the client left") from error
        answer = asyncio.ensure_future(self._answer(method, path, body))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([answer, leaving], return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise ConnectionError("the client left")
        finally:
            for task in (answer, leaving):
                task.cancel()
            await asyncio.gather(answer, leaving, return_exceptions=True)

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            if (method, path) == ("GET", protocol.ISOLATION):
                return 200, {"isolation": [asdict(line) for line in self._sandbox.isolation]}
            if method != "POST" or path not in (protocol.RUN, protocol.TESTS):
                return 404, {"error": f"there is no {method} {path}"}
            asked = json.loads(body)
            if not isinstance(asked, dict):
                return 400, {"error": "the request must be an object"}
            program, limits = protocol.to_program(asked.get("program")), protocol.to_limits(asked.get("limits"))
            if path == protocol.RUN:
                return 200, {"result": asdict(await self._sandbox.run(program, limits))}
            verdict = await self._sandbox.run_tests(program, protocol.to_tests(asked.get("tests")), limits)
            return 200, {"verdict": protocol.from_verdict(verdict)}
        except (UserError, ValueError, RecursionError) as error:
            return 400, {"error": str(error)}
        except PolyturnError as error:
            return 503, {"error": str(error)}


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    """Method, path and headers by lower-case name. Raises ValueError when it is no HTTP."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, version = lines[0].split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"{version!r} is not spoken here")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return method, path, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def serve_for_ever(port: int, *, token: str | None, unsafe: bool) -> None:
    """Serve a local sandbox until cancelled, and say what holds."""
    sandbox = LocalSandbox(unsafe=unsafe)
    await sandbox.start()
    server = SandboxServer(sandbox, token=token, port=port)
    try:
        await server.start()
        print("\n".join(map(str, sandbox.isolation)), f"listening on {server.url}", sep="\n", flush=True)
        await asyncio.Event().wait()
    finally:
        await server.stop()
        await sandbox.stop()


def main(words: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m polyturn.sandbox.server", description="Serve a sandbox on this machine.")
    parser.add_argument("--port", type=int, default=8808)
    parser.add_argument("--unsafe", action="store_true", help="serve even where a line of defence that is needed does not hold")
    options = parser.parse_args(words)
    try:
        asyncio.run(serve_for_ever(options.port, token=os.environ.get("POLYTURN_SANDBOX_TOKEN"), unsafe=options.unsafe))
    except KeyboardInterrupt:
        return 0
    except PolyturnError as error:
        print(f"polyturn: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
