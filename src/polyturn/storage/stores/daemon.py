"""A request to a daemon that keeps checkpoints in memory, whichever its protocol is."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyturn.errors import StorageError
from polyturn.storage.checksums import hasher
from polyturn.storage.progress import CHUNK_BYTES, tick


@contextlib.contextmanager
def answer_of(
    url: str,
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    key: str,
    body: Any,
    headers: Mapping[str, str],
    refusal: Callable[[http.client.HTTPResponse, str], Exception | None],
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request about `key`, and the connection closed after it.

    Raises what `refusal` makes of the answer, and StorageError when the daemon can't be reached.
    """
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        refused = refusal(answer, key)
        if refused is not None:
            raise refused
        tick(0)
        yield answer
    except (OSError, http.client.HTTPException) as error:
        said = str(error) or type(error).__name__
        raise StorageError(f"{url}: {key} failed: {said}; is the daemon running there?") from error
    finally:
        connection.close()


def pieces(url: str, answer: http.client.HTTPResponse, key: str, checksum: str | None) -> Iterator[bytes]:
    """The body in pieces. Raises StorageError at the end when it did not arrive as `checksum` says."""
    found = hasher()
    while piece := answer.read(CHUNK_BYTES):
        found.update(piece)
        tick(len(piece))
        yield piece
    if answer.length or checksum != found.hexdigest():
        raise StorageError(f"{url}: {key} did not arrive as it was sent")
