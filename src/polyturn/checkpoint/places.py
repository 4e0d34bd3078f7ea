"""Where the checkpoints of a run are: its tiers, by the recipe. Needs no torch."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from polyturn.config.schema import CheckpointSection
from polyturn.errors import ConfigError
from polyturn.storage.stores import Access, Encryption, LocalStore, open_store
from polyturn.storage.tiers import Tier, Tiers

_SHARED_MEMORY = Path("/dev/shm")
MEMORY, DISK, REMOTE = "memory", "disk", "s3"
WRITING = ".writing"
"""Folder in which a checkpoint is put together."""


def tiers_of(section: CheckpointSection, run_id: str, checkpoints: Path, say: Callable[[str], None]) -> Tiers:
    """The tiers that a recipe asks for, the fastest first. Raises ConfigError for a URL that no store takes."""
    every, keep, found = section.every, section.keep, list[Tier]()
    if every.memory is not None:
        found.append(Tier(MEMORY, LocalStore(_own(memory_root(checkpoints))), every.memory, keep.memory))
    if every.disk is not None:
        found.append(Tier(DISK, LocalStore(checkpoints), every.disk, keep.disk, keep.milestones))
    if section.url is not None:
        remote = every.s3 or every.disk or 1
        store = open_store(section.url, access_of(section))
        found.append(Tier(REMOTE, store, remote, keep.s3, keep.milestones))
    return Tiers(run_id, found, say=say)


def access_of(section: CheckpointSection) -> Access:
    """How the recipe's object store is reached."""
    return Access(endpoint_url=section.endpoint_url, encryption=Encryption(section.sse, section.kms_key_id))


def memory_root(checkpoints: Path) -> Path:
    """The folder in shared memory that belongs to one run folder of one user."""
    place = hashlib.sha256(str(checkpoints.resolve()).encode()).hexdigest()[:16]
    return _SHARED_MEMORY / f"polyturn-{os.getuid()}" / place


def _own(root: Path) -> Path:
    """`root` itself, in a folder of this user's alone. Raises ConfigError where somebody else has put one in its place."""
    folder = root.parent
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"checkpoint.every.memory: {folder} can't be made ({error.strerror}); set it to null, other tiers do without"
        ) from error
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not this user's own folder, closed to others; remove it, or set checkpoint.every.memory=null"
        )
    return root


def scratch_root(checkpoints: Path, tiers: list[str]) -> Path:
    """Where a checkpoint for these tiers is put together: on the disk of the first of them, so that files can be linked."""
    return (memory_root(checkpoints) if MEMORY in tiers else checkpoints) / WRITING
