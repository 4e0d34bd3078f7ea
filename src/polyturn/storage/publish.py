"""Copies one sealed checkpoint into a store and back.

Up: shards first, then the manifest, which makes it visible, and only where none is yet. Down: every byte that came is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from polyturn.errors import StorageError
from polyturn.storage.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    Place,
    Shard,
    read_manifest,
    stored_key,
    why_not_whole,
    write_manifest,
    wrong_file,
)
from polyturn.storage.parallel import each
from polyturn.storage.stores.base import MissingKeyError

_THREADS = 4
"""Files that are hashed at once."""


def publish(folder: Path, manifest: Manifest, place: Place, *, link: bool = True, known: bool = False) -> str | None:
    """Upload, commit, look again. None when the checkpoint is there now, a sentence when another writer's is, and is kept.

    `known`: this process has published it here before, so what is there need not be read to be believed.
    Raises StorageError when it can't be done, which leaves nothing visible that would not be found out.
    """
    # What stands there from before a resume may be damaged, and has the right size all the same.
    replace = place.store.exists(f"{place.key}/{MANIFEST}") and why_not_whole(place, manifest, deep=not known) is not None
    for _ in range(2):
        upload(folder, manifest.shards, place, link=link, replace=replace)
        kept = commit(manifest, place)
        if kept is not None:
            return kept
        fault = why_not_whole(place, manifest, deep=replace)
        if fault is None:
            return None
        replace = True  # a collector of orphans took some from under us
    raise StorageError(f"{place} does not keep what is written to it: {fault}")


def upload(folder: Path, shards: Iterable[Shard], place: Place, *, link: bool = True, replace: bool = False) -> int:
    """Copy shards that are not there yet, or all with `replace`, and return how many bytes were copied.

    A save that was cut off goes on where it was: what is there with its size is not copied again. Each machine of a run without
    a shared disk uploads its own shards. Raises StorageError, also for a file that changed since it was sealed.
    """
    there = {} if replace else {entry.key: entry.num_bytes for entry in place.store.list(f"{place.key}/")}
    missing = [shard for shard in shards if there.get(stored_key(place, shard)) != shard.num_bytes]
    for fault in each(lambda shard: wrong_file(folder / shard.name, shard), missing, threads=_THREADS):
        if fault is not None:
            raise StorageError(f"{folder} is not as it was sealed: {fault}")
    for shard in missing:
        place.store.put(folder / shard.name, stored_key(place, shard), link=link)
    return sum(shard.num_bytes for shard in missing)


def commit(manifest: Manifest, place: Place) -> str | None:
    """Make uploaded shards a checkpoint. None when it is there now, a sentence when another writer's is, and is kept.

    Raises StorageError when a shard is missing in the store, which leaves nothing visible.
    """
    fault = why_not_whole(place, manifest, deep=False)
    if fault is not None:
        raise StorageError(f"{place} can't be completed: {fault}")
    content, key = manifest.to_json(), f"{place.key}/{MANIFEST}"
    for _ in range(2):
        if place.store.put_if_absent(content, key):
            return None
        verdict = _other_writer(manifest, place)
        if verdict == "ours":
            return None
        if verdict != "worthless":
            return verdict
        place.store.delete(key)
    raise StorageError(f"{place} can't be completed: its manifest is being written and deleted by others")


def download(
    manifest: Manifest, place: Place, into: Path, *, link: bool = True, after_each: Callable[[], None] = lambda: None
) -> str | None:
    """Fetch all shards into a folder under their own names, then write the manifest there. A sentence when one is not right.

    Files that are in the folder already and are right are not fetched again. Raises StorageError when the store fails.
    """
    for shard in manifest.shards:
        file = into / shard.name
        if not file.exists() or wrong_file(file, shard) is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                place.store.get(stored_key(place, shard), file, link=link)
            except MissingKeyError:
                return f"its shard {shard.name} is missing"
            except OSError as error:
                raise StorageError(f"{file} can't be written: {error.strerror or error}") from error
            fault = wrong_file(file, shard)
            if fault is not None:
                file.unlink(missing_ok=True)
                return fault
        after_each()
    write_manifest(into, manifest)
    return None


def _other_writer(manifest: Manifest, place: Place) -> str:
    """What the manifest that is there already amounts to: `ours`, `worthless`, or a sentence about another whole checkpoint."""
    try:
        other = read_manifest(place)
        if _content(other) == _content(manifest):
            return "ours"
        fault = why_not_whole(place, other, deep=True)
    except (MissingKeyError, DamagedError):
        return "worthless"
    if fault is not None:
        return "worthless"
    return f"another writer completed {place} at {other.created} with other content; that one is kept, and ours is not added"


def _content(manifest: Manifest) -> tuple[object, ...]:
    return manifest.run_id, manifest.step, manifest.policy_version, manifest.shards
