"""Stores of every kind, with the servers behind them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from parts.memory_tier import memory_tier
from parts.s3 import BUCKET, moto_server, seaweedfs_server
from polyturn.storage.stores import Access, LocalStore, ObjectStore, Store, open_store

KINDS = [
    "local",
    "fsspec-memory",
    "fsspec-local",
    "memory-tier",
    *(pytest.param(kind, marks=pytest.mark.real) for kind in ("s3-moto", "s3-seaweedfs")),
]


class Servers:
    """S3 servers, each started with its first use and shared by the tests of a session."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._urls: dict[str, str] = {}

    def url(self, kind: str) -> str:
        """Of a running server, `moto` or `seaweedfs`."""
        if kind not in self._urls:
            opened = moto_server() if kind == "moto" else seaweedfs_server()
            self._urls[kind] = self._stack.enter_context(opened)
        return self._urls[kind]

    def close(self) -> None:
        """Stop them."""
        self._stack.close()


@contextlib.contextmanager
def opened(kind: str, tmp_path: Path, servers: Servers) -> Iterator[Store]:
    """An empty store."""
    if kind == "local":
        yield LocalStore(tmp_path / "store")
    elif kind.startswith("s3-"):
        yield ObjectStore(BUCKET, f"tests/{uuid.uuid4().hex}", endpoint_url=servers.url(kind[3:]), part_bytes=5 * 1024 * 1024)
    elif kind == "memory-tier":
        with memory_tier(tmp_path / "shared memory") as url:
            yield open_store(url, Access(token="secret"))
    elif kind == "fsspec-memory":
        yield open_store(f"memory://tests/{uuid.uuid4().hex}")
    elif kind == "fsspec-local":
        yield open_store(f"local://{tmp_path / 'a folder'}")
    else:
        raise AssertionError(kind)
