"""Who is reading a checkpoint right now, so that nobody deletes it meanwhile.

A lease is a small file beside the checkpoints with a time after which it counts no more: a reader that was killed keeps
nothing for ever. Reader and deleter can't miss each other: the reader writes its lease and then looks for the manifest, the
deleter takes the manifest away and then looks for leases, and puts it back when it finds one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator

from polyturn.errors import StorageError
from polyturn.storage.manifest import Place
from polyturn.storage.stores.base import MissingKeyError

LEASE_S = 900.0
"""A reader renews its lease long before this has passed."""
_FOLDER = "leases"


class Lease:
    """A reader's claim on one checkpoint. `renew` keeps it alive; it costs a request only when half of its time is over."""

    def __init__(self, place: Place, lease_s: float) -> None:
        self._store = place.store
        self._key = f"{_prefix(place)}{uuid.uuid4().hex}"
        self._lease_s = lease_s
        self._until = 0.0

    def renew(self) -> None:
        """Write it when it is due."""
        now = time.time()
        if self._until - now > self._lease_s / 2:
            return
        self._write(now)

    def keep(self) -> None:
        """`renew`, where a store that does not take it is no reason to stop reading."""
        with contextlib.suppress(StorageError):
            self.renew()

    def _write(self, now: float) -> None:
        until = now + self._lease_s
        content = {"until": until, "host": socket.gethostname(), "pid": os.getpid()}
        old, self._key = self._key, f"{self._key.partition('.')[0]}.{int(until)}"
        self._store.put_if_absent(json.dumps(content).encode(), self._key)
        if self._until:
            self._store.delete(old)
        self._until = until

    def end(self) -> None:
        """Take it away. A store that does not answer keeps it until its time is over."""
        with contextlib.suppress(StorageError):
            self._store.delete(self._key)


@contextlib.contextmanager
def leased(place: Place, lease_s: float = LEASE_S) -> Iterator[Lease | None]:
    """Hold a lease on a checkpoint while reading it. None where the store takes no files from us: then nothing holds it."""
    lease = Lease(place, lease_s)
    try:
        lease.renew()
    except StorageError:
        yield None
        return
    try:
        yield lease
    finally:
        lease.end()


def readers(place: Place) -> list[str]:
    """Who reads a checkpoint, one text a live lease. Leases whose time is over are removed.

    Raises StorageError when the store can't be asked.
    """
    found = []
    for entry in place.store.list(_prefix(place)):
        try:
            content = json.loads(place.store.read(entry.key))
            until, who = float(content["until"]), f"{content['host']}, process {content['pid']}"
        except MissingKeyError:
            continue
        except (ValueError, KeyError, TypeError, RecursionError):
            until, who = entry.modified + LEASE_S, "a lease that can't be read"
        if until > time.time():
            found.append(who)
        else:
            place.store.delete(entry.key)
    return found


def lease_prefix(run_id: str) -> str:
    """Where the leases of a run are."""
    return f"{run_id}/{_FOLDER}/"


def _prefix(place: Place) -> str:
    run_id, _, step = place.key.rpartition("/")
    return f"{lease_prefix(run_id)}{step}/"
