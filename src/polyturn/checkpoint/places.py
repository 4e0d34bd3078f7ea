"""Where the checkpoints of a run are: its tiers, by the recipe. Needs no torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from polyturn.config.checkpoint_section import DISK, MEMORY, REMOTE, CheckpointSection
from polyturn.config.schema import filled
from polyturn.errors import ConfigError, PolyturnError
from polyturn.storage.retention import deleted_after
from polyturn.storage.stores import Access, Encryption, LocalStore, open_store
from polyturn.storage.stores.hyperpod import DAEMON, HyperPodStore
from polyturn.storage.stores.sagemaker_s3 import SagemakerS3Store
from polyturn.storage.tiers import Tier, Tiers

_SHARED_MEMORY = Path("/dev/shm")
WRITING = ".writing"
"""Folder in which a checkpoint is put together."""


def local_tiers(section: CheckpointSection) -> tuple[str, ...]:
    """Tiers that are folders of this machine; all others go over a network."""
    return (DISK,) if section.backend == "sagemaker_tiered" else (MEMORY, DISK)


def tiers_of(section: CheckpointSection, run_id: str, checkpoints: Path, say: Callable[[str], None]) -> Tiers:
    """The tiers that a recipe asks for, the fastest first. Raises ConfigError for a URL that no store takes."""
    keep, mirrors, found = section.keep, section.mirror_tiers(), list[Tier]()
    of_sagemaker = section.backend == "sagemaker_tiered"
    for name, every in section.cadence().items():
        if name == MEMORY and of_sagemaker:
            found.append(Tier(name, HyperPodStore(section.memory_daemon or DAEMON), every, keep.memory))
        elif name == MEMORY:
            found.append(Tier(name, LocalStore(_own(memory_root(checkpoints))), every, keep.memory))
        elif name == DISK:
            found.append(Tier(name, LocalStore(checkpoints), every, keep.disk, keep.milestones))
        elif name in mirrors:
            found.append(Tier(name, open_store(mirrors[name], access_of(section)), every, keep.memory))
        else:
            store = open_store(filled(section.url), access_of(section))
            store = SagemakerS3Store(store) if of_sagemaker else store
            found.append(Tier(name, store, every, keep.s3, keep.milestones))
    return Tiers(run_id, found, say=say)


def shared_tiers(tiers: Tiers, section: CheckpointSection) -> list[Tier]:
    """Those that other machines share, so that another run of the same name may be there."""
    return [tier for tier in tiers.tiers if tier.name not in local_tiers(section)]


def free_memory_tiers(section: CheckpointSection, run_id: str, checkpoints: Path, *, elsewhere: bool) -> None:
    """Give back the memory that a run's checkpoints take on this machine and, if asked and if they answer, on others."""
    shutil.rmtree(memory_root(checkpoints), ignore_errors=True)
    if elsewhere:
        for tier in shared_tiers(tiers_of(section, run_id, checkpoints, lambda _: None), section):
            if tier.name != REMOTE:
                with contextlib.suppress(PolyturnError):  # a daemon that is gone keeps nothing
                    deleted_after(tier.store, run_id, -1)


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
