"""What a user means by a place of checkpoints: a store, a run in it, one checkpoint, a sealed folder, the folder of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from polyturn.errors import ConfigError, StorageError
from polyturn.storage.guard import guarded
from polyturn.storage.leases import leased
from polyturn.storage.manifest import MANIFEST, DamagedError, Manifest, Place, read_manifest, step_name, step_of, why_not_whole
from polyturn.storage.publish import download
from polyturn.storage.retention import StoredStep, stored_steps
from polyturn.storage.stores import Access, LocalStore, Store, open_store
from polyturn.storage.stores.base import MissingKeyError

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints in its run folder."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Checkpoints that a user named: runs of a store, and one step of them or all. `tier` is how the place is called."""

    tier: str
    store: Store
    run_ids: tuple[str, ...]
    step: int | None = None

    def steps(self) -> list[StoredStep]:
        """What is there, whole or not, the newest first. Raises StorageError."""
        found = [stored for run_id in self.run_ids for stored in stored_steps(self.store, run_id)]
        return [stored for stored in found if self.step in (None, stored.step)]


def find(place: str, access: Access) -> Selection | Path:
    """What `place` means; a Path for a sealed folder that is in no store.

    Raises ConfigError where there is nothing of the kind, StorageError when the store does not answer.
    """
    place = place if place.endswith("://") else place.rstrip("/") or "/"
    if "://" not in place:
        folder = Path(place).expanduser().resolve()
        if (folder / CHECKPOINTS).is_dir():
            return _run_in(LocalStore(folder / CHECKPOINTS), folder.name)
        if _is_sealed(folder):
            return folder
        place = str(folder)
    parent, _, last = place.rpartition("/")
    step = step_of(last)
    if step is not None:
        root, _, run_id = parent.rpartition("/")
        selection = Selection(place, _opened(root, access), (run_id,), step)
        if not selection.steps():
            raise ConfigError(f"{place}: there is no such checkpoint; `polyturn checkpoint list {parent}` shows what is there")
        return selection
    store = _opened(place, access)
    names = {entry.key.split("/")[0] for entry in store.list("")}
    if any(step_of(name) is not None for name in names):
        return _run_in(_opened(parent, access), last)
    runs = [name for name in names if any(True for _ in stored_steps(store, name))]
    if not runs:
        raise ConfigError(f"{place}: there are no checkpoints; give a run folder, a store or a checkpoint in one")
    return Selection(store.url, store, tuple(sorted(runs)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A checkpoint and what is wrong with it, None for nothing. `manifest` is None when there is none to believe."""

    where: str
    step: int
    manifest: Manifest | None
    num_bytes: int
    fault: str | None
    tier: str = ""
    """As its run calls it; empty for a place that belongs to no run's recipe."""


def judge(stored: StoredStep, *, deep: bool, tier: str = "") -> Verdict:
    """Look at a checkpoint; `deep` reads every byte, under a lease. Raises StorageError when the store does not answer."""
    num_bytes = sum(entry.num_bytes for entry in stored.entries)
    try:
        manifest = read_manifest(stored.place)
    except (MissingKeyError, DamagedError) as error:
        return Verdict(str(stored.place), stored.step, None, num_bytes, str(error), tier)
    with leased(stored.place) if deep else contextlib.nullcontext():
        fault = why_not_whole(stored.place, manifest, deep=deep)
    return Verdict(str(stored.place), stored.step, manifest, num_bytes, fault, tier)


def judge_folder(folder: Path, *, deep: bool) -> Verdict:
    """Look at a sealed folder."""
    try:
        manifest = read_manifest(folder)
    except StorageError as error:
        return Verdict(str(folder), step_of(folder.name) or 0, None, 0, str(error))
    fault = why_not_whole(folder, manifest, deep=deep)
    return Verdict(str(folder), manifest.step, manifest, manifest.num_bytes, fault)


def fetch_selected(selections: Iterable[Selection], into: Path, say: Callable[[str], None]) -> Manifest:
    """Fetch the newest selected checkpoint that arrives whole, of equal steps the first. Raises StorageError without one."""
    tiers = tuple(selections)
    found = [stored for selection in tiers for stored in selection.steps()]
    for stored in sorted(found, key=lambda stored: -stored.step):
        with leased(stored.place) as lease:
            try:
                manifest = read_manifest(stored.place)
                fault = download(manifest, stored.place, into, after_each=(lambda: None) if lease is None else lease.keep)
            except (MissingKeyError, DamagedError) as error:
                fault = str(error)
        if fault is None:
            return manifest
        say(f"{stored.place} is not taken: {fault}")
    raise StorageError(f"{', '.join(tier.tier for tier in tiers)}: no checkpoint there is whole")


def place_in(root: str, manifest: Manifest, access: Access) -> Place:
    """Where a checkpoint belongs in the store `root`."""
    return Place(_opened(root, access), f"{manifest.run_id}/{step_name(manifest.step)}")


def _run_in(store: Store, run_id: str) -> Selection:
    return Selection(store.url, guarded(store, store.url), (run_id,))


def _opened(url: str, access: Access) -> Store:
    if url.endswith(("://", ":/")) or url == "":
        raise ConfigError("a checkpoint is in a run, and a run in a store: give a longer place, such as s3://bucket/prefix/run")
    store = open_store(url, access)
    return guarded(store, store.url)


def _is_sealed(folder: Path) -> bool:
    """Whether a folder holds a checkpoint under its plain names, as it was before it went to a store."""
    if not (folder / MANIFEST).is_file():
        return False
    try:
        shards = read_manifest(folder).shards
    except StorageError:
        return step_of(folder.name) is None
    return not any((folder / shard.stored).exists() for shard in shards)
