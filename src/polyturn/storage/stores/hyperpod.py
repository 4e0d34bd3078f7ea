"""Checkpoints in the memory of HyperPod's daemon, or of ours with `--hyperpod`, as files of a store under our names.

The daemon keeps shards by namespace, rank and step, and drops all but the newest steps by itself. What Amazon's library writes
is in the namespace of the run; the rest of the state and the manifest are in a second one, which is made here.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from polyturn.errors import ConfigError, StorageError
from polyturn.storage.checksums import hash_bytes, hash_file
from polyturn.storage.stores.base import Entry, MissingKeyError
from polyturn.storage.stores.daemon import answer_of, pieces
from polyturn.storage.stores.local import write_pieces
from polyturn.storage.stores.sagemaker_names import DATA, MANIFEST, METADATA, SHARDS, STATE, Part, part_of, stored_names
from polyturn.storage.stores.section import Section

DAEMON = "http://ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local:9200"
"""Where HyperPod serves it."""
STEPS_RETAINED = 3
"""Complete steps that the daemon keeps, of either namespace; the library asks for as many."""
_META = "Shard-Meta"
_WAIT_S = 10.0
_RANKS = {DATA: 0, METADATA: 1, MANIFEST: 0, STATE: 1}
_MOST_STEPS = 100


class HyperPodStore:
    """The daemon at `url`. Nothing is asked of it yet. Raises ConfigError for a URL that is none."""

    def __init__(self, url: str = DAEMON, *, wait_s: float = _WAIT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise ConfigError(f"checkpoint.memory_daemon={url}: give http://HOST:PORT, such as {DAEMON}")
        self.url = f"http://{parts.netloc}"
        self._host, self._port, self._wait_s = parts.hostname, parts.port, wait_s

    def put(self, file: Path, key: str, *, link: bool = False) -> None:
        """Send a file."""
        part = _part(key)
        try:
            num_bytes, checksum = hash_file(file)
            with Section(file, 0, num_bytes) as body:
                self._send(part, body, num_bytes, checksum)
        except OSError as error:
            raise StorageError(f"{self.url}: {key} failed: {error.strerror or error}") from error

    def get(self, key: str, file: Path, *, link: bool = False) -> None:
        """Receive a file, and compare its checksum."""
        write_pieces(self.chunks(key), file)

    def read(self, key: str) -> bytes:
        """Content of a small file."""
        return b"".join(self.chunks(key))

    def chunks(self, key: str) -> Iterator[bytes]:
        """Content in pieces. Raises StorageError at the end when it did not arrive as it was."""
        with self._answer("GET", _path(_part(key)), key) as answer:
            yield from pieces(self.url, answer, key, _checksum(answer.headers.get(_META)))

    def list(self, prefix: str) -> list[Entry]:
        """Files by prefix, of one run: of a step that is named, or of all that are complete in one of the namespaces."""
        run_id, _, rest = prefix.partition("/")
        if not run_id or not "step_".startswith(rest[:5]):
            return []
        folder = f"{run_id}/{rest.partition('/')[0]}"
        named = part_of(f"{folder}/{MANIFEST}") if "/" in rest else None
        steps = [named.step] if named else sorted({*self._steps(run_id), *self._steps(_companion(run_id))})
        found = [entry for step in steps for entry in self._files(f"{run_id}/step_{step:08d}")]
        return [entry for entry in found if entry.key.startswith(prefix)]

    def delete(self, key: str) -> None:
        """Remove a file."""
        with contextlib.suppress(MissingKeyError), self._answer("DELETE", _path(_part(key)), key) as answer:
            answer.read()

    def exists(self, key: str) -> bool:
        """Whether it is there."""
        return self._num_bytes(key) is not None

    def put_if_absent(self, content: bytes, key: str) -> bool:
        """The protocol has no such thing: looked at first, then written."""
        if self.exists(key):
            return False
        self._send(_part(key), content, len(content), hash_bytes(content))
        return True

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """The daemon drops by itself what is old."""
        return 0

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, part: Part, body: Any, num_bytes: int, checksum: str) -> None:
        self._make_namespace(_namespace(part))
        meta = {"checksum": base64.b64encode(bytes.fromhex(checksum)).decode(), "algorithm": "xxh3_128"}
        headers = {_META: json.dumps(meta), "Content-Length": str(num_bytes)}
        with self._answer("POST", _path(part), part.name, body, headers) as answer:
            answer.read()

    def _make_namespace(self, name: str) -> None:
        path = f"/v1/cp/namespaces/{quote(name, safe='')}"
        try:
            with self._answer("GET", path, name) as answer:
                answer.read()
        except MissingKeyError:
            wanted = f"num_ranks=2&steps_retained={STEPS_RETAINED}"
            with self._answer("POST", f"{path}?{wanted}", name) as answer:
                answer.read()

    def _steps(self, namespace: str) -> Sequence[int]:
        path = f"/v1/cp/checkpoints/{quote(namespace, safe='')}/latest?limit={_MOST_STEPS}"
        try:
            with self._answer("GET", path, namespace) as answer:
                steps = json.loads(answer.read())
        except MissingKeyError:
            return []
        except ValueError as error:
            raise StorageError(f"{self.url}: the steps of {namespace} are no JSON; is that HyperPod's daemon?") from error
        return [step for step in steps if type(step) is int and step >= 0]

    def _files(self, folder: str) -> Sequence[Entry]:
        """Those of one step. The protocol knows no times; a file is as old as the look at it."""
        names, now, found = dict[str, str](), time.time(), list[Entry]()
        with contextlib.suppress(MissingKeyError):
            content = self.read(f"{folder}/{MANIFEST}")
            names = stored_names(content)
            found.append(Entry(f"{folder}/{MANIFEST}", len(content), now))
        for name in SHARDS:
            num_bytes = self._num_bytes(f"{folder}/{name}")
            if num_bytes is not None:
                found.append(Entry(f"{folder}/{names.get(name, name)}", num_bytes, now))
        return found

    def _num_bytes(self, key: str) -> int | None:
        """Size of a file by the head of an answer whose body is not read; None where there is none."""
        try:
            with self._answer("GET", _path(_part(key)), key) as answer:
                return int(answer.headers["Content-Length"])
        except MissingKeyError:
            return None
        except (TypeError, ValueError) as error:
            raise StorageError(f"{self.url}: {key} comes without its size") from error

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, key: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._wait_s, blocksize=1 << 20)
        with answer_of(self.url, connection, method, path, key, body, headers or {}, self._refusal) as answer:
            yield answer

    def _refusal(self, answer: http.client.HTTPResponse, key: str) -> StorageError | None:
        if answer.status == 404:
            return MissingKeyError(f"{self.url}: there is no {key}")
        if not 200 <= answer.status < 300:
            said = answer.read(2000).decode("utf-8", "replace").strip()
            return StorageError(f"{self.url}: {key} failed: {said or answer.reason}")
        return None


def _part(key: str) -> Part:
    part = part_of(key)
    if part is None:
        raise StorageError(f"{key} is no file that HyperPod's daemon keeps")
    return part


def _companion(run_id: str) -> str:
    """The namespace of what we add."""
    return f"{run_id}-manifest"


def _namespace(part: Part) -> str:
    return part.run_id if part.name in (DATA, METADATA) else _companion(part.run_id)


def _path(part: Part) -> str:
    return f"/v1/cp/checkpoints/{quote(_namespace(part), safe='')}/{_RANKS[part.name]}/{part.step}"


def _checksum(meta: str | None) -> str:
    """The xxh3_128 that a header says, in hexadecimal; empty when it says none."""
    try:
        return base64.b64decode(json.loads(meta or "")["checksum"]).hex()
    except (ValueError, KeyError, TypeError):
        return ""
