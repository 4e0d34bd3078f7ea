"""A server of the test's own that speaks the chat-completions form, by a script."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    """Answers requests by a script: what to do with each in turn, the last thing again and again."""

    def __init__(self) -> None:
        self.script: list[Any] = ['{"score": 7}']
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.asked = threading.Event()
        self.released = threading.Event()
        self.now = self.most = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self._thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            act = self.script[min(len(self.requests), len(self.script) - 1)]
            self.requests.append(body)
            self.headers.append({"path": handler.path, **dict(handler.headers)})
            self.asked.set()
            self.now += 1
            self.most = max(self.most, self.now)
        status, headers, raw = 200, {}, b""
        if act == "hang":
            self.released.wait(30)
            act = '{"score": 1}'
        if isinstance(act, tuple):
            status, headers, raw = act
        elif isinstance(act, bytes):
            raw = act
        else:
            time.sleep(0.01)
            answer = {"choices": [{"message": {"content": act}}], "usage": {"total_tokens": 11}}
            raw = json.dumps(answer).encode()
        with self._lock:
            self.now -= 1
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()
        self._thread.join()
