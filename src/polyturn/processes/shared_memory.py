"""Segments in /dev/shm that processes leave behind when they are killed, and their removal.

A segment has no owner that the kernel would remember. So the living are asked now and then which ones they use, and what was
seen with them is removed when they have ended and nobody else uses it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from polyturn.processes.descendants import all_pids

_FOLDER = Path("/dev/shm")


class SharedMemory:
    """Remembers the segments of a family of processes. Made before the first of them starts."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._folder = folder
        self._before = self._present()
        self._seen: dict[Path, int] = {}
        self._strange: dict[Path, int] = {}

    def look(self, pids: Callable[[], Iterable[int]], *, again: bool = False) -> None:
        """Note which segments, made since this object was, the processes `pids()` use now.

        Looking costs next to nothing while there are no new segments; those that were nobody's at the last look are passed
        over, unless `again`.
        """
        fresh = self._new()
        if fresh.items() <= self._seen.items() | (set() if again else self._strange.items()):
            return
        for pid in pids():
            for path in _used_by(pid, self._folder) & fresh.keys():
                self._seen[path] = fresh[path]
        self._strange = {path: inode for path, inode in fresh.items() if path not in self._seen}

    def sweep(self) -> list[Path]:
        """Remove the noted segments that no process uses any more; those that were removed."""
        present = self._present()
        left = {path for path, inode in self._seen.items() if present.get(path) == inode}
        if left:
            for pid in all_pids():
                left -= _used_by(pid, self._folder)
        for path in left:
            with contextlib.suppress(OSError):
                path.unlink()
        return sorted(left)

    def _new(self) -> dict[Path, int]:
        return {path: inode for path, inode in self._present().items() if self._before.get(path) != inode}

    def _present(self) -> dict[Path, int]:
        try:
            with os.scandir(self._folder) as entries:
                return {Path(entry.path): entry.inode() for entry in entries}
        except OSError:
            return {}


def _used_by(pid: int, folder: Path) -> set[Path]:
    """Files in `folder` that a process has mapped or open; empty for one that is gone, or not ours to look at."""
    found: set[str] = set()
    prefix = f"{folder}/"
    try:
        with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="surrogateescape") as lines:
            found |= {line[line.index(prefix) :].rstrip("\n") for line in lines if prefix in line}
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                if target.startswith(prefix):
                    found.add(target)
    except OSError:
        pass
    return {Path(path) for path in found if not path.endswith(" (deleted)")}
