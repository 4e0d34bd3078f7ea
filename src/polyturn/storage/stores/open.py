"""From a URL to a store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from polyturn.errors import ConfigError
from polyturn.storage.stores.base import Store
from polyturn.storage.stores.local import LocalStore
from polyturn.storage.stores.memory_tier import SCHEME, MemoryTierStore
from polyturn.storage.stores.s3 import Encryption, ObjectStore
from polyturn.storage.stores.urls import redacted

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*(?:::[A-Za-z][A-Za-z0-9+.\-]*)*)://")


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a store, besides its URL. Nothing here is a secret but `token`, which never reaches a message."""

    endpoint_url: str | None = None
    """Of an S3 server that is not AWS's; `AWS_ENDPOINT_URL` when left out."""
    region: str | None = None
    encryption: Encryption = field(default_factory=Encryption)
    token: str | None = field(default=None, repr=False)
    """Of a memory-tier daemon; `POLYTURN_MEMORY_TIER_TOKEN` when left out."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the fsspec filesystem."""


def open_store(url: str, access: Access = Access()) -> Store:
    """The store of a URL: a folder, `s3://bucket/prefix`, `memory-tier://host:port`, or whatever fsspec reads.

    Nothing is asked yet. Raises ConfigError for a URL that names no place.
    """
    found = _SCHEME.match(url)
    if found is None:
        if not url:
            raise ConfigError("the place of a store is empty; give a folder or a URL such as s3://bucket/prefix")
        return LocalStore(Path(url).expanduser())
    scheme, rest = found[1].lower(), url[found.end() :]
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ConfigError(f"{redacted(url)}: a file URL has three slashes, as in file:///mnt/checkpoints")
        return LocalStore(unquote(parts.path))
    if scheme in ("s3", "s3a"):
        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise ConfigError(f"{redacted(url)} names no bucket; give s3://bucket/prefix")
        endpoint = access.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return ObjectStore(bucket, prefix, endpoint_url=endpoint, region=access.region, encryption=access.encryption)
    if scheme == SCHEME:
        return MemoryTierStore(url, access.token or os.environ.get("POLYTURN_MEMORY_TIER_TOKEN"))
    from polyturn.storage.stores.fsspec import FsspecStore, refuse_unknown

    refuse_unknown(scheme, url)
    return FsspecStore(url, access.options)
