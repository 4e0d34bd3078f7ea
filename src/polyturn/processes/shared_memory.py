"""Segments in /dev/shm that processes leave behind when they are killed, and their removal.

A segment has no owner that the kernel would remember. So the living are asked now and then which ones they use, and what was
seen with them is removed when they have ended and nobody else uses it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_FOLDER = Path("/dev/shm")


class SharedMemory:
    """Remembers the segments of a family of processes. Made before the first of them starts."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._folder = folder
        self._before = self._present()
        self._seen: dict[Path, int] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Note which segments, made since this object was, the processes `pids` use now."""
        fresh = self._new()
        if fresh:
            for pid in pids:
                for path in _used_by(pid, self._folder) & fresh.keys():
                    self._seen[path] = fresh[path]

    def sweep(self) -> list[Path]:
        """Remove the noted segments that no process uses any more; those that were removed."""
        present = self._present()
        left = {path for path, inode in self._seen.items() if present.get(path) == inode}
        if left:
            for name in os.listdir("/proc"):
                if name.isdigit():
                    left -= _used_by(int(name), self._folder)
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
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
            found |= {line[line.index(prefix) :].rstrip("\n") for line in lines if prefix in line}
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
                if target.startswith(prefix):
                    found.add(target)
    except OSError:
        pass
    return {Path(path) for path in found if not path.endswith(" (deleted)")}
