"""Files in the memory of another machine, kept by `polyturn memory-tier serve` there. Every transfer carries a checksum."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from polyturn.errors import ConfigError, StorageError
from polyturn.storage.checksums import hash_bytes, hash_file
from polyturn.storage.stores.base import AccessError, Entry, MissingKeyError, check_key
from polyturn.storage.stores.daemon import answer_of, pieces
from polyturn.storage.stores.local import write_pieces
from polyturn.storage.stores.section import Section

SCHEME = "memory-tier"
DEFAULT_PORT = 9300
CHECKSUM = "X-Polyturn-XXH3"
"""Header with the checksum of a file, in both directions."""
_WAIT_S = 10.0


class MemoryTierStore:
    """A store at `memory-tier://host:port`. Requests bring `token`, which is in no message."""

    def __init__(self, url: str, token: str | None, *, wait_s: float = _WAIT_S) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or DEFAULT_PORT
        except ValueError as error:
            raise ConfigError(f"{url}: {error}") from error
        if not parts.hostname or parts.path.strip("/") or parts.username:
            raise ConfigError(f"{SCHEME}://{parts.hostname}: a memory tier is {SCHEME}://HOST:PORT and no more")
        if not token:
            raise ConfigError(f"{url} needs a token; set POLYTURN_MEMORY_TIER_TOKEN to the one of the daemon")
        self._host, self._port, self._wait_s = parts.hostname, port, wait_s
        self._headers = {"Authorization": f"Bearer {token}"}

    @property
    def url(self) -> str:
        """Host and port."""
        return f"{SCHEME}://{self._host}:{self._port}"

    def put(self, file: Path, key: str, *, link: bool = False) -> None:
        """Send a file; the daemon refuses it when it does not arrive as it was."""
        path = _file_path(key)
        try:
            num_bytes, checksum = hash_file(file)
            with Section(file, 0, num_bytes) as body:
                self._ask("PUT", path, key, body, {CHECKSUM: checksum, "Content-Length": str(num_bytes)})
        except OSError as error:
            raise StorageError(f"{self.url}: {key} failed: {error.strerror or error}") from error

    def get(self, key: str, file: Path, *, link: bool = False) -> None:
        """Receive a file, and compare its checksum."""
        _file_path(key)
        write_pieces(self.chunks(key), file)

    def read(self, key: str) -> bytes:
        """Content of a small file."""
        return b"".join(self.chunks(key))

    def chunks(self, key: str) -> Iterator[bytes]:
        """Content in pieces. Raises StorageError at the end when it did not arrive as it was."""
        with self._answer("GET", _file_path(key), key) as answer:
            yield from pieces(self.url, answer, key, answer.headers.get(CHECKSUM))

    def list(self, prefix: str) -> list[Entry]:
        """Files by prefix."""
        found = self._ask("GET", f"/v1/list?{urlencode({'prefix': prefix})}", prefix)
        return [Entry(key, num_bytes, modified) for key, num_bytes, modified in found["files"]]

    def delete(self, key: str) -> None:
        """Remove a file."""
        self._ask("DELETE", _file_path(key), key)

    def exists(self, key: str) -> bool:
        """Whether it is there."""
        try:
            with self._answer("HEAD", _file_path(key), key):
                return True
        except MissingKeyError:
            return False

    def put_if_absent(self, content: bytes, key: str) -> bool:
        """The daemon decides which of several writers is the first."""
        headers = {CHECKSUM: hash_bytes(content), "If-None-Match": "*"}
        return bool(self._ask("PUT", _file_path(key), key, content, headers)["stored"])

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Remove what uploads that broke off have left."""
        query = urlencode({"prefix": prefix, "older_than_s": older_than_s})
        return int(self._ask("POST", f"/v1/sweep?{query}", prefix)["removed"])

    def _ask(self, method: str, path: str, key: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        with self._answer(method, path, key, body, headers) as answer:
            raw = answer.read()
        try:
            return json.loads(raw)
        except ValueError as error:
            raise StorageError(f"{self.url}: the answer for {key} is no JSON; is that a memory tier?") from error

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, key: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._wait_s, blocksize=1 << 20)
        given = {**self._headers, **(headers or {})}
        with answer_of(self.url, connection, method, path, key, body, given, self._refusal) as answer:
            yield answer

    def _refusal(self, answer: http.client.HTTPResponse, key: str) -> StorageError | None:
        if answer.status == 200:
            return None
        said = answer.read(2000).decode("utf-8", "replace").strip()
        if answer.status == 404:
            return MissingKeyError(f"{self.url}: there is no file {key}")
        if answer.status == 401:
            return AccessError(f"{self.url}: the token is wrong; set POLYTURN_MEMORY_TIER_TOKEN to the daemon's")
        return StorageError(f"{self.url}: {key} failed: {said or answer.reason}")


def _file_path(key: str) -> str:
    return f"/v1/files/{quote(check_key(key))}"
