"""Who of the ranks is still there, told through the store at which they met: a broken connection alone names nobody.

Each rank counts on in the store, every second. Whoever lost a collective looks twice, and names those who no longer count, with
their machine. When the store itself is gone, so is the rank or the agent that kept it.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import threading
import time
from typing import Any

import torch.distributed

from polyturn.errors import DeadlineError
from polyturn.processes.deadlines import run_with_deadline

dist: Any = torch.distributed  # most of what is used of it is in no stub
_BEAT_S = 1.0
_LOOK_S = 3.5
"""Longer than three beats."""
_STORE_S = 2.0
"""What the store may take to answer: it answers at once, or is gone."""

_NO_STORE = "the store of the ranks, and with it the machine of rank 0,"


class RollCall:
    """The counter of this rank, which goes until `stop`, and a look at the others'."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._store: Any = dist.PrefixStore("roll", _own_connection())
        self._stopped = threading.Event()
        self._store.set(f"host/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._beats = 0
        self._beat()
        self._thread = threading.Thread(target=self._run, name="roll call", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # Python ends a thread that is in the store then, and C++ aborts the process for that

    def stop(self) -> None:
        """Count no more, from when this returns."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join(2 * _STORE_S)

    def missing(self) -> list[str]:
        """The ranks that don't count any more, each with its machine and process. Takes a few seconds."""
        try:
            # A store whose process stands still answers nobody, and waits for it can't be cut short.
            gone = run_with_deadline(self._look, _LOOK_S + 2 * _STORE_S, "the store of the ranks")
        except DeadlineError:
            gone = [_NO_STORE]
        if self._rank == 0:
            time.sleep(_STORE_S)  # the store may be in this process, which ends next, and the others look too
        return gone

    def _look(self) -> list[str]:
        try:
            before = self._counts()
            time.sleep(_LOOK_S)
            after = self._counts()
            return [
                f"rank {rank} ({self._store.get(f'host/{rank}').decode()})"
                for rank in range(self._size)
                if rank != self._rank and after[rank] == before[rank]
            ]
        except (RuntimeError, ValueError):
            return [_NO_STORE]

    def _counts(self) -> list[bytes]:
        return [bytes(self._store.get(f"beat/{rank}")) for rank in range(self._size)]

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", str(self._beats))

    def _run(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            try:
                self._beat()
            except (RuntimeError, ValueError):
                return  # whoever needs the store hears of it


def _own_connection() -> Any:
    """The store of the default group through a connection of this thread's own: a look must not wait behind a collective."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    mine = store.clone() if hasattr(store, "clone") else store
    mine.set_timeout(datetime.timedelta(seconds=_STORE_S))
    return mine
