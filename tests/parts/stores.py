"""Stores of every kind, with the servers behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from polyturn.storage.stores import LocalStore, Store

KINDS = ["local"]


@contextlib.contextmanager
def opened(kind: str, tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    yield LocalStore(tmp_path / "store")
