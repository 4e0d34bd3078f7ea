"""What a whole checkpoint is: a folder of files (shards) and `MANIFEST.json`, which names them all and is written last.

    step_00000042/
      __0_0.distcp  __1_0.distcp  .metadata      the shards, whatever their names
      MANIFEST.json                              run, step, policy version; name, size and checksum of every shard

What has no valid manifest does not exist. The manifest carries a checksum of itself, so one flipped byte anywhere is found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from polyturn.errors import ConfigError, StorageError
from polyturn.storage.checksums import hash_bytes, hash_file, hasher
from polyturn.storage.parallel import each
from polyturn.storage.stores.base import Entry, MissingKeyError, Store, check_key
from polyturn.storage.stores.local import DRAFT, sync_folder

FORMAT = 1
"""Raised when a manifest changes so that older readers would misunderstand it."""
MANIFEST = "MANIFEST.json"
_STEP = re.compile(r"step_([0-9]{8,})")
_HEX = re.compile(r"[0-9a-f]{32}")
_THREADS = 4


class DamagedError(StorageError):
    """A manifest that is there and can't be believed; the message says why, as `verify` does."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of a checkpoint: its name in the folder (`a/b` for one in a subfolder), its size, its xxh3_128 in hexadecimal."""

    name: str
    num_bytes: int
    xxh3: str

    @property
    def stored(self) -> str:
        """Its name in a store. The content is part of it: two writers of one step never write over each other's files."""
        return f"{self.name}.{self.xxh3[:16]}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All there is to know about a checkpoint without opening its shards."""

    run_id: str
    step: int
    policy_version: int
    created: str
    """Time of sealing, UTC, ISO 8601. For people: nothing is decided by it."""
    shards: tuple[Shard, ...]
    meta: dict[str, Any] = field(default_factory=dict)
    """Whatever the writer adds, JSON values: versions of packages, the resolved recipe, the names of modules."""
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Of all shards together."""
        return sum(shard.num_bytes for shard in self.shards)

    def to_json(self) -> bytes:
        """The file's content; equal manifests give equal bytes."""
        body = {
            "format": self.format,
            "run_id": self.run_id,
            "step": self.step,
            "policy_version": self.policy_version,
            "created": self.created,
            "meta": self.meta,
            "shards": [{"name": shard.name, "num_bytes": shard.num_bytes, "xxh3": shard.xxh3} for shard in self.shards],
        }
        whole = {**body, "checksum": hash_bytes(_canonical(body))}
        return (json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "surrogatepass")

    @classmethod
    def from_json(cls, content: bytes) -> Manifest:
        """Read the file's content. Raises DamagedError that says what is wrong with it."""
        try:
            whole = json.loads(content.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"its manifest of {len(content):,} bytes is torn: {error}") from error
        if not isinstance(whole, dict) or "checksum" not in whole:
            raise DamagedError("its manifest is torn: it is no JSON object with a checksum")
        checksum = whole.pop("checksum")
        try:
            found = hash_bytes(_canonical(whole))
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"its manifest is damaged: {error}") from error
        if checksum != found:
            raise DamagedError("its manifest is damaged: its checksum does not fit what it says")
        if whole.get("format") != FORMAT:
            raise DamagedError(
                f"its manifest has format {whole.get('format')!r} and this Polyturn reads {FORMAT}; use the one that wrote it"
            )
        return _parsed(whole)


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint in a store: the files whose keys start with `key`/."""

    store: Store
    key: str

    def __str__(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.key}"


def step_name(step: int) -> str:
    """Name of a checkpoint's folder; sorting the names sorts the steps.

    >>> step_name(42)
    'step_00000042'
    """
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder's name says, None for any other name.

    >>> step_of("step_00000042"), step_of("step_42"), step_of("latest")
    (42, None, None)
    """
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def shard_names(folder: Path) -> list[str]:
    """Names of all files in a folder and its subfolders that belong to a checkpoint."""
    names = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name == MANIFEST or DRAFT in path.name or path.is_dir():
            continue
        if not path.is_file() or path.is_symlink():
            raise StorageError(f"{path} is no plain file; a checkpoint is made of plain files")
        names.append(name)
    return sorted(names)


def hash_shards(folder: Path, names: Iterable[str] | None = None, *, freeze: bool = True) -> tuple[Shard, ...]:
    """Hash the files of a folder, all or those named, in threads, and make them durable.

    On several machines without a shared disk every one does this for its own files, and the leader seals them all.
    `freeze` takes away the right to write, since a sealed file may be shared with a tier. Raises OSError.
    """

    def shard(name: str) -> Shard:
        path = folder / check_key(name)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        if freeze:
            path.chmod(path.stat().st_mode & 0o555)
        return Shard(name, *hash_file(path))

    chosen = shard_names(folder) if names is None else sorted(names)
    return tuple(each(shard, chosen, threads=_THREADS))


def seal(
    folder: str | Path,
    *,
    run_id: str,
    step: int,
    policy_version: int,
    meta: Mapping[str, Any] | None = None,
    shards: Iterable[Shard] | None = None,
) -> Manifest:
    """Make a folder of files a checkpoint: hash all of them, make them durable, write the manifest by rename.

    `shards`: what `hash_shards` found, here or on other machines, in place of hashing this folder. The files must not change
    afterwards. Raises StorageError: no file, or a disk that is full or can't be written to; ConfigError: a bad run id.
    """
    folder = Path(folder)
    check_run_id(run_id)
    try:
        found = hash_shards(folder) if shards is None else tuple(sorted(shards, key=lambda shard: shard.name))
        manifest = Manifest(
            run_id=run_id,
            step=step,
            policy_version=policy_version,
            created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            shards=found,
            meta=dict(meta or {}),
        )
        content = manifest.to_json()
        if Manifest.from_json(content) != manifest:
            raise ValueError("the meta of a checkpoint must come back from JSON as it was: text keys, lists, finite numbers")
        for inner in {(folder / shard.name).parent for shard in found if (folder / shard.name).exists()}:
            sync_folder(inner)
        _write_manifest(folder, content)
    except OSError as error:
        raise StorageError(f"{folder}: sealing the checkpoint failed: {error.strerror or error}") from error
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest beside shards that are whole, by rename. Raises StorageError."""
    try:
        _write_manifest(folder, manifest.to_json())
    except OSError as error:
        raise StorageError(f"{folder}: its manifest can't be written: {error.strerror or error}") from error


def _write_manifest(folder: Path, content: bytes) -> None:
    draft = folder / f".{MANIFEST}{DRAFT}{os.getpid()}-{time.monotonic_ns()}"
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / MANIFEST)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    sync_folder(folder)
    sync_folder(folder.parent)


def read_manifest(where: str | Path | Place) -> Manifest:
    """The manifest of a checkpoint.

    Raises MissingKeyError when there is none, DamagedError for one that can't be believed, StorageError when the store does not
    answer.
    """
    if isinstance(where, Place):
        try:
            return Manifest.from_json(where.store.read(f"{where.key}/{MANIFEST}"))
        except MissingKeyError as error:
            raise MissingKeyError("it has no manifest, so it was never completed") from error
    try:
        return Manifest.from_json((Path(where) / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise MissingKeyError("it has no manifest, so it was never completed") from error
    except OSError as error:
        raise DamagedError(f"its manifest can't be read: {error.strerror or error}") from error


def verify(where: str | Path | Place, deep: bool = True) -> str | None:
    """None when a checkpoint is whole, else why it is not, in one sentence.

    Looks at the manifest, then that every shard is there with its size; `deep` reads them all and compares checksums.
    Raises StorageError only when the store itself does not answer.
    """
    try:
        manifest = read_manifest(where)
    except (MissingKeyError, DamagedError) as error:
        return str(error)
    return why_not_whole(where, manifest, deep=deep)


def why_not_whole(where: str | Path | Place, manifest: Manifest, *, deep: bool) -> str | None:
    """`verify` for a manifest that was read already."""
    if isinstance(where, Place):
        name = where.key.rpartition("/")[2]
        entries = {entry.key: entry for entry in where.store.list(f"{where.key}/")}
        return _first_fault(manifest, name, lambda shard: _stored_fault(where, shard, entries, deep=deep))
    folder = Path(where)
    return _first_fault(manifest, folder.name, lambda shard: _file_fault(folder / shard.name, shard, deep=deep))


def stored_key(place: Place, shard: Shard) -> str:
    """Key of a shard in its store."""
    return f"{place.key}/{shard.stored}"


def wrong_file(path: Path, shard: Shard) -> str | None:
    """Why a file is not this shard, in one sentence; None when it is, to the last byte."""
    return _file_fault(path, shard, deep=True)


def check_run_id(run_id: str) -> str:
    """The run id itself. Raises ConfigError for one that is no plain name, or that would hide checkpoints."""
    try:
        check_key(run_id)
    except StorageError as error:
        raise ConfigError(f"the run id {run_id!r}: {error}") from error
    if "/" in run_id or DRAFT in run_id or step_of(run_id) is not None or run_id.startswith("."):
        raise ConfigError(f"the run id {run_id!r} is not allowed; give a plain name without slashes, such as lookup")
    return run_id


def _first_fault(manifest: Manifest, name: str, fault: Callable[[Shard], str | None]) -> str | None:
    said = step_of(name)
    if said is not None and said != manifest.step:
        return f"its manifest is of step {manifest.step} and stands in {name}"
    return next((found for found in each(fault, manifest.shards, threads=_THREADS) if found is not None), None)


def _file_fault(path: Path, shard: Shard, *, deep: bool) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != shard.num_bytes:
            return _wrong_size(shard, num_bytes)
        if not deep:
            return None
        _, checksum = hash_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return f"its shard {shard.name} is missing"
    except OSError as error:
        return f"its shard {shard.name} can't be read: {error.strerror or error}"
    return None if checksum == shard.xxh3 else _wrong_bytes(shard)


def _stored_fault(place: Place, shard: Shard, entries: Mapping[str, Entry], *, deep: bool) -> str | None:
    key = stored_key(place, shard)
    if key not in entries:
        return f"its shard {shard.name} is missing"
    if entries[key].num_bytes != shard.num_bytes:
        return _wrong_size(shard, entries[key].num_bytes)
    if not deep:
        return None
    found, num_bytes = hasher(), 0
    try:
        for piece in place.store.chunks(key):
            found.update(piece)
            num_bytes += len(piece)
    except MissingKeyError:
        return f"its shard {shard.name} is missing"
    if num_bytes != shard.num_bytes:
        return _wrong_size(shard, num_bytes)
    return None if found.hexdigest() == shard.xxh3 else _wrong_bytes(shard)


def _wrong_size(shard: Shard, num_bytes: int) -> str:
    return f"its shard {shard.name} has {num_bytes:,} bytes and the manifest says {shard.num_bytes:,}"


def _wrong_bytes(shard: Shard) -> str:
    return f"its shard {shard.name} is damaged: its checksum is not the manifest's"


def _canonical(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def _parsed(whole: dict[str, Any]) -> Manifest:
    """The manifest of checked JSON. Its names come from outside, so each is checked before anything is done with it."""
    try:
        shards = tuple(_shard(found) for found in whole["shards"])
        manifest = Manifest(
            run_id=_typed(whole["run_id"], str),
            step=_count(whole["step"]),
            policy_version=_count(whole["policy_version"]),
            created=_typed(whole["created"], str),
            shards=shards,
            meta=_typed(whole["meta"], dict),
        )
    except (KeyError, TypeError, ValueError, StorageError) as error:
        raise DamagedError(f"its manifest is not one of Polyturn: {type(error).__name__}: {error}") from error
    if not shards:
        raise DamagedError("its manifest names no shard; a checkpoint has at least one file")
    if len({shard.name for shard in shards}) != len(shards):
        raise DamagedError("its manifest names a shard twice; names must be unique among all ranks")
    return manifest


def _shard(found: Any) -> Shard:
    name, checksum = check_key(_typed(found["name"], str)), _typed(found["xxh3"], str)
    if name == MANIFEST or DRAFT in name:
        raise ValueError(f"{name} is no name for a shard")
    if not _HEX.fullmatch(checksum):
        raise ValueError(f"xxh3={checksum!r} has not 32 hexadecimal digits")
    return Shard(name, _count(found["num_bytes"]), checksum)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _count(value: Any) -> int:
    number: int = _typed(value, int)
    if number < 0:
        raise ValueError(f"{number} is below 0")
    return number
