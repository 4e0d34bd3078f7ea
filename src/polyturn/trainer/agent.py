"""Starts the trainer's ranks of one machine through torchrun's elastic agent, and says how each of them ended.

    supervisor ── agent ── trainer-0, trainer-1, ...

The agent starts the ranks together with what torch.distributed reads (RANK, WORLD_SIZE, MASTER_ADDR, ...), and ends all of
them when one fails; there are no restarts. Its own report comes only after the others have been ended, which can take half a
minute. So a thread looks at the ranks, and writes down at once how one ended (`processes.endings`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from polyturn.errors import ResourceError
from polyturn.processes.descendants import descendants
from polyturn.processes.endings import ending_words, write_ending
from polyturn.processes.parents import PARENT
from polyturn.processes.role import Role

_BACKEND = "polyturn-loopback"
_LOOPBACK = "127.0.0.1"
_STORE_S = 60.0
_MONITOR_S = 0.5
_LOOK_S = 0.1


def run_agent(role: Role, argv: tuple[str, ...], num_ranks: int) -> int:
    """Run `argv` once a rank, `${local_rank}` in it replaced by the number, until all have ended. Returns the exit code.

    0 when all ended with 0; else the exit code of the rank that failed first, or ResourceError's when a signal killed it;
    143 after a SIGTERM.
    """
    os.environ[PARENT] = str(os.getpid())  # the ranks end when this process does
    with contextlib.suppress(ValueError):  # registered by an earlier call
        rendezvous_handler_registry.register(_BACKEND, LoopbackRendezvous)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=role.folder.name,
        role="trainer",
        rdzv_backend=_BACKEND,
        max_restarts=0,
        monitor_interval=_MONITOR_S,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # a rank writes its log itself; without this a folder is left in /tmp
        local_addr=_LOOPBACK,
    )
    with (
        role.heartbeat() as heartbeat,
        _RankWatch(role.folder, num_ranks) as watch,
        heartbeat.waiting(f"{num_ranks} ranks to end"),
    ):
        try:
            launch_agent(config, argv[0], list(argv[1:]))
            # All ended with 0. Of those that the agent collected first, the watch saw nothing.
            for rank in range(num_ranks):
                write_ending(role.folder, f"trainer-{rank}", 0)
        except ChildFailedError as error:
            codes = watch.codes | {rank: failure.exitcode for rank, failure in error.failures.items()}
            for rank in codes.keys() - watch.codes.keys():
                write_ending(role.folder, f"trainer-{rank}", codes[rank])
            return _say_failure(role.folder, codes)
        except SignalException as error:
            return 128 + error.sigval
    return 0


class LoopbackRendezvous(RendezvousHandler):
    """The meeting of one agent with itself: a store for its ranks that listens on the loopback device only.

    The one that torch brings listens on all of them, and unpickles what anybody writes to it.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._closed = False
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((_LOOPBACK, 0))
        listener.listen(128)
        self._port = int(listener.getsockname()[1])
        self._store = TCPStore(
            _LOOPBACK,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_S),
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        """Its name."""
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store, and start none of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Everybody is here: the one agent, first of one."""
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_LOOPBACK, self._port))

    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def set_closed(self) -> None:
        """Close it."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody else comes."""
        return 0

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close it; the store ends with the process."""
        self._closed = True
        return True


class _RankWatch:
    """Notes how each rank ended as soon as it has, before the agent collects it. Sees nothing where there is no /proc."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        self._pids: dict[int, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self.codes: dict[int, int] = {}
        """Exit codes by rank, in the order in which they ended."""

    def __enter__(self) -> _RankWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            if len(self._pids) < self._num_ranks:
                self._find()
            for rank, pid in self._pids.items():
                if rank not in self.codes:
                    self._look(rank, pid)

    def _find(self) -> None:
        """Which child is which rank. One that has died already shows no variables; the agent starts ranks in order."""
        dead = []
        for child in descendants():
            if child.parent != os.getpid() or child.pid in self._pids.values():
                continue
            rank = _rank_of(child.pid)
            if rank is not None:
                self._pids[rank] = child.pid
            elif child.ended:
                dead.append(child.pid)
        unknown = [rank for rank in range(self._num_ranks) if rank not in self._pids]
        if len(dead) == len(unknown):  # all have been started
            self._pids |= dict(zip(unknown, sorted(dead), strict=True))

    def _look(self, rank: int, pid: int) -> None:
        """How a rank ended, without collecting it: that is for the agent to do, which may have done so by now."""
        with contextlib.suppress(OSError):
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                self.codes[rank] = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                write_ending(self._folder, f"trainer-{rank}", self.codes[rank])


def _rank_of(pid: int) -> int | None:
    """The rank that the agent gave a child of this process."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                return int(variable[5:])
    return None


def _say_failure(folder: Path, codes: dict[int, int]) -> int:
    """Print which rank failed, `codes` being in the order in which they ended, and return the exit code."""
    failed = {rank: code for rank, code in codes.items() if code}
    first = min(failed, key=lambda rank: _blame(failed[rank]))
    code = failed[first]
    print(f"trainer-{first} {ending_words(code)}; the other ranks have been ended", file=sys.stderr, flush=True)
    return code if code > 0 else ResourceError.exit_code


def _blame(code: int) -> int:
    """The lower, the likelier to be what the others ended of: the agent ends them by SIGTERM, or they lose their peer.

    A rank that loses its peer says so with an exit code of its own, or gloo's threads abort it before it can.
    """
    last = (-signal.SIGABRT, ResourceError.exit_code, -signal.SIGTERM)
    if code in last:
        return 2 + last.index(code)
    return 0 if code < 0 else 1
