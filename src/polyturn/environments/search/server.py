"""A retrieval server over a corpus, so that several trainers share one index. Standard library only, loopback only.

    python -m polyturn.environments.search.server --corpus corpus.jsonl.gz --port 8000

It answers both forms of `http.py`, and `GET /health`. With `--token-env NAME` a request must carry the token in that variable.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from polyturn.environments.search.base import Passage
from polyturn.environments.search.bm25 import Bm25
from polyturn.environments.search.facts import BUILTIN, facts_index
from polyturn.errors import EnvironmentSetupError, UserError
from polyturn.processes.http_words import bears_token

MOST_BYTES, MOST_QUERIES, MOST_RESULTS = 1 << 20, 256, 100


class BadRequest(Exception):
    """A request that is answered with `status` and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class SearchServer(ThreadingHTTPServer):
    """Serves `search` at 127.0.0.1. Port 0 takes a free one; `url` says which it is."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, search: Callable[[str, int], Sequence[Passage]], *, port: int = 0, token: str | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.search = search
        self.token = token

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong; that a client has left, as one whose deadline passed does, is nothing to say."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """The base of its URLs."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: SearchServer
    protocol_version = "HTTP/1.1"
    timeout = 60
    paths: ClassVar[Mapping[str, str]] = {"/retrieve": "topk", "/search": "k"}

    def do_GET(self) -> None:
        self._answer(200, {"ok": True}) if self.path == "/health" else self._answer(404, {"error": "there is no such path"})

    def do_POST(self) -> None:
        try:
            answer = self._found()
        except BadRequest as error:
            self.close_connection = True  # what is left of the body would be taken for the next request
            self._answer(error.status, {"error": str(error)})
        except Exception as error:  # one request fails, the server goes on
            self.close_connection = True
            self._answer(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self._answer(200, answer)

    def _found(self) -> dict[str, Any]:
        if not bears_token(self.headers.get("Authorization"), self.server.token):
            raise BadRequest(401, "the token is missing or wrong")
        if self.path not in self.paths:
            raise BadRequest(404, f"there is no such path; there are {', '.join(self.paths)}")
        queries, k = _request(self._body(), self.paths[self.path])
        results = [self.server.search(query, k) for query in queries]
        if self.path == "/search":
            return {"results": [[{"id": p.id, "title": p.title, "text": p.text} for p in found] for found in results]}
        documents = [
            [
                {"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, "score": 1 / place}
                for place, p in enumerate(found, 1)
            ]
            for found in results
        ]
        return {"result": documents}

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise BadRequest(411, "Content-Length is missing")
        if int(length) > MOST_BYTES:
            raise BadRequest(413, f"the body has more than {MOST_BYTES:,} bytes")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise BadRequest(400, "the body is not JSON") from None

    def _answer(self, status: int, answer: Mapping[str, Any]) -> None:
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line a search would fill a disk."""


def _request(body: Any, count_name: str) -> tuple[list[str], int]:
    if not isinstance(body, dict):
        raise BadRequest(400, "the body is no object")
    queries, k = body.get("queries"), body.get(count_name, 3)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries) or len(queries) > MOST_QUERIES:
        raise BadRequest(400, f"'queries' must be a list of up to {MOST_QUERIES} texts")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MOST_RESULTS:
        raise BadRequest(400, f"{count_name!r} must be a number from 1 to {MOST_RESULTS}")
    return queries, k


def main(argv: Sequence[str] | None = None) -> int:
    """Build or open the index, then serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m polyturn.environments.search.server", description="Serve a corpus.")
    parser.add_argument("--corpus", metavar="FILE", required=True, help=f".jsonl or .jsonl.gz with id, title, text; {BUILTIN}")
    parser.add_argument("--port", metavar="N", type=int, default=8000, help="at 127.0.0.1 (default 8000; 0 takes a free one)")
    parser.add_argument("--token-env", metavar="NAME", help="variable with the token that requests must carry")
    args = parser.parse_args(argv)
    try:
        server = _server(args.corpus, args.port, args.token_env)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"serving {args.corpus} at {server.url}/retrieve", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0


def _server(corpus: str, port: int, token_env: str | None) -> SearchServer:
    token = None
    if token_env is not None and not (token := os.environ.get(token_env, "").strip()):
        raise EnvironmentSetupError(f"--token-env={token_env}, and that variable is unset; set it to the token")
    index = facts_index() if corpus == BUILTIN else Bm25(corpus)
    asyncio.run(index.start())
    try:
        return SearchServer(index.search_now, port=port, token=token)
    except (OSError, OverflowError) as error:
        raise EnvironmentSetupError(f"--port={port} can't be served on ({error}); give a free one, or 0") from error


if __name__ == "__main__":
    sys.exit(main())
