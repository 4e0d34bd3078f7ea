"""What a tier keeps and what it deletes: the newest few, the milestones, whatever is being read; and no dead remains."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from polyturn.storage.leases import readers
from polyturn.storage.manifest import MANIFEST, DamagedError, Manifest, Place, read_manifest, step_name, step_of, stored_key
from polyturn.storage.stores.base import Entry, MissingKeyError, Store

GRACE_S = 6 * 3600.0
"""Files without a manifest are left alone for this long: a save may be under way."""


@dataclass(slots=True)
class StoredStep:
    """The files of one step in a store."""

    step: int
    place: Place
    entries: list[Entry] = field(default_factory=list)

    @property
    def has_manifest(self) -> bool:
        """Whether a manifest is among them, good or not."""
        return any(entry.key == f"{self.place.key}/{MANIFEST}" for entry in self.entries)

    @property
    def modified(self) -> float:
        """When the last of them was written."""
        return max(entry.modified for entry in self.entries)

    def whole(self) -> Manifest | None:
        """Its manifest when that is valid and every shard is there with its size. Raises StorageError when not answered."""
        if not self.has_manifest:
            return None
        try:
            manifest = read_manifest(self.place)
        except (MissingKeyError, DamagedError):
            return None
        sizes = {entry.key: entry.num_bytes for entry in self.entries}
        right = all(sizes.get(stored_key(self.place, shard)) == shard.num_bytes for shard in manifest.shards)
        return manifest if right and manifest.step == self.step else None


def stored_steps(store: Store, run_id: str) -> list[StoredStep]:
    """All steps of a run of which a store has files, the newest first. Raises StorageError."""
    found: dict[int, StoredStep] = {}
    for entry in store.list(f"{run_id}/step_"):
        name = entry.key.split("/")[1]
        step = step_of(name)
        if step is not None:
            found.setdefault(step, StoredStep(step, Place(store, f"{run_id}/{name}"))).entries.append(entry)
    return sorted(found.values(), key=lambda stored: stored.step, reverse=True)


def steps_to_keep(complete: Iterable[int], *, keep: int, keep_every: int = 0) -> set[int]:
    """The newest `keep` of the complete steps, at least one, and every multiple of `keep_every` (0: none).

    >>> sorted(steps_to_keep([10, 20, 30, 40, 50], keep=2, keep_every=20))
    [20, 40, 50]
    """
    steps = sorted(set(complete), reverse=True)
    milestones = {step for step in steps if keep_every and step % keep_every == 0}
    return set(steps[: max(1, keep)]) | milestones


def prune(store: Store, run_id: str, *, keep: int, keep_every: int = 0, grace_s: float = GRACE_S) -> list[str]:
    """Delete what a store need not keep of a run; a sentence for each step that was touched. Raises StorageError."""
    steps = stored_steps(store, run_id)
    whole = {stored.step: manifest for stored in steps if (manifest := stored.whole()) is not None}
    kept = steps_to_keep(whole, keep=keep, keep_every=keep_every)
    old = time.time() - grace_s
    said: list[str] = []
    for stored in reversed(steps):
        manifest = whole.get(stored.step)
        if manifest is None:
            if stored.modified < old:
                said.append(_delete_files(stored, "remains of a save that was never completed"))
        elif stored.step not in kept:
            said.append(delete_step(stored, f"keep={keep}"))
        else:
            said += _collect(stored, manifest, old)
    count = store.sweep(f"{run_id}/", grace_s)
    if count:
        said.append(f"{store.url}: {count} unfinished files of dead writers removed")
    return said


def delete_step(stored: StoredStep, why: str) -> str:
    """Delete a checkpoint, unless it is being read; a sentence on which of the two. Raises StorageError.

    The manifest goes first, so that what is half deleted does not exist. A reader writes its lease before it looks for the
    manifest, and we look for leases after taking the manifest away, so one of the two sees the other.
    """
    store, place = stored.place.store, stored.place
    busy = readers(place)
    if not busy:
        key = f"{place.key}/{MANIFEST}"
        try:
            content = store.read(key)
        except MissingKeyError:
            return f"{place} was deleted by somebody else"
        store.delete(key)
        busy = readers(place)
        if not busy:
            return _delete_files(stored, why)
        store.put_if_absent(content, key)
    return f"{place} is kept for now: {busy[0]} is reading it"


def deleted_after(store: Store, run_id: str, step: int) -> list[str]:
    """Delete every checkpoint later than `step`, complete or not; a sentence each. Raises StorageError."""
    later = [stored for stored in stored_steps(store, run_id) if stored.step > step]
    why = f"later than {step_name(step)}, from which training goes on"
    return [delete_step(stored, why) if stored.has_manifest else _delete_files(stored, why) for stored in later]


def _delete_files(stored: StoredStep, why: str) -> str:
    manifest_key = f"{stored.place.key}/{MANIFEST}"
    for entry in sorted(stored.entries, key=lambda entry: entry.key != manifest_key):
        stored.place.store.delete(entry.key)
    num_bytes = sum(entry.num_bytes for entry in stored.entries)
    return f"{stored.place} deleted, {num_bytes:,} bytes: {why}"


def _collect(stored: StoredStep, manifest: Manifest, old: float) -> list[str]:
    """Delete shards beside a complete checkpoint that are not its own: those of a second writer that came too late."""
    own = {stored_key(stored.place, shard) for shard in manifest.shards} | {f"{stored.place.key}/{MANIFEST}"}
    strange = [entry for entry in stored.entries if entry.key not in own and entry.modified < old]
    for entry in strange:
        stored.place.store.delete(entry.key)
    return [f"{stored.place}: {len(strange)} files that are not its own deleted"] if strange else []
