"""What Amazon's library for tiered checkpoints calls its files, and what we add: the rest of the state, and the manifest.

ours                                        theirs
lookup/step_00000042/checkpoint.pt.5d4c...  namespace lookup, rank 0, step 42; lookup/rank_0/step_42/checkpoint.pt in S3
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

DATA, METADATA = "checkpoint.pt", "metadata.metadata"
"""Theirs."""
STATE, MANIFEST = "state.json", "MANIFEST.json"
"""Ours."""
SHARDS = (DATA, METADATA, STATE)

_KEY = re.compile(r"([^/]+)/step_([0-9]{8,})/(.+?)(?:\.[0-9a-f]{16})?")


class Part(NamedTuple):
    """A file of a checkpoint."""

    run_id: str
    step: int
    name: str


def part_of(key: str) -> Part | None:
    """What a key of a store means here; None for a file that is no part of such a checkpoint.

    >>> part_of("lookup/step_00000042/checkpoint.pt.0123456789abcdef")
    Part(run_id='lookup', step=42, name='checkpoint.pt')
    >>> part_of("lookup/leases/step_00000042/x")
    """
    found = _KEY.fullmatch(key)
    if found is None or found[3] not in (*SHARDS, MANIFEST):
        return None
    return Part(found[1], int(found[2]), found[3])


def stored_names(manifest: bytes) -> dict[str, str]:
    """The names that shards have in a store, by their own, as far as what may be a manifest says so."""
    try:
        shards: Any = json.loads(manifest)["shards"]
        return {str(shard["name"]): f"{shard['name']}.{shard['xxh3'][:16]}" for shard in shards}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
