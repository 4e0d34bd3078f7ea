"""Who descends from a process, as /proc tells it: whatever leaves its parent is handed to the supervisor, so none gets lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from parts.patience import PATIENCE_S


def descendants(pid: int) -> set[int]:
    """Process ids of all that descend from `pid`, the dead that nobody collected included."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(fields[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


async def gone(pid: int) -> None:
    """Wait until nothing descends from `pid`. A report is sent a moment before its monitor has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while left := descendants(pid):
        assert time.monotonic() < deadline, f"still there: {left}"
        await asyncio.sleep(0.01)


def children(pid: int) -> set[int]:
    """Those who descend from `pid` at one remove."""
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


async def present(pid: int, programs: int = 1) -> None:
    """Wait until so many programs run under `pid`: below the monitor of each there is somebody.

    What ran before, as each start tries one, must be `gone` first: it would be counted.
    """
    deadline = time.monotonic() + PATIENCE_S
    while sum(bool(descendants(monitor)) for monitor in children(pid)) < programs:
        assert time.monotonic() < deadline, f"fewer than {programs} run under {pid}"
        await asyncio.sleep(0.01)
