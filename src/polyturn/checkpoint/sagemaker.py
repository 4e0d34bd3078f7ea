"""Saves to the tiers of SageMaker with Amazon's library, and puts our manifest on top, last.

The library writes one file of tensors and one that describes them, to the memory daemon or to S3. What it hands over is hashed
on its way, so the manifest says what must be there. Whoever reads asks the manifest first, and gets the bytes from our stores:
the library's own reader takes damaged and missing files for loaded ones.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save

from polyturn.checkpoint.files import STATE, rank_errors, read_tensors
from polyturn.checkpoint.tree import Tensors
from polyturn.config.checkpoint_section import MEMORY, REMOTE, CheckpointSection
from polyturn.config.schema import filled
from polyturn.errors import MissingDependencyError, StorageError
from polyturn.storage.checksums import hasher
from polyturn.storage.guard import GuardedStore
from polyturn.storage.manifest import MANIFEST, Manifest, Place, Shard, why_not_whole
from polyturn.storage.progress import Progress, progress
from polyturn.storage.stores.hyperpod import DAEMON, STEPS_RETAINED
from polyturn.storage.stores.sagemaker_names import DATA, METADATA
from polyturn.storage.tiers import Outcome, Tiers

LIBRARY = "amzn_sagemaker_checkpointing"
TIERS = (MEMORY, REMOTE)
"""Those that the library writes to."""
_QUIET_S = 60.0
_SLOWEST_BYTES_PER_S = 1e8
"""The library moves a file at once, or in pieces of 32 MiB, after it has put all of it together in memory."""
_WAIT_S = 10.0


class LibraryTiers:
    """The tiers of one run that Amazon's library writes. Raises MissingDependencyError where it is not installed."""

    def __init__(self, section: CheckpointSection, tiers: Tiers, say: Callable[[str], None]) -> None:
        self._library = import_library()
        self._section, self._tiers, self._say = section, tiers, say

    def publish(self, folder: Path, manifest: Manifest, name: str) -> Outcome:
        """Save a sealed checkpoint to a tier. Raises nothing: a failure is an Outcome, and a sentence that is said."""
        (tier,) = [tier for tier in self._tiers.tiers if tier.name == name]
        place = self._tiers.place(tier, manifest.step)
        try:
            self._publish(folder, manifest, place, name)
        except Exception as error:  # whatever the library raises
            words = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
            sentence = f"step {manifest.step} is not in tier {name}: {words}"
            self._say(sentence)
            return Outcome(name, ok=False, sentence=sentence)
        return Outcome(name, ok=True)

    def _publish(self, folder: Path, manifest: Manifest, place: Place, name: str) -> None:
        store = place.store
        assert isinstance(store, GuardedStore), "all tiers are guarded"
        # What is there of this step is written over, so from now on it doesn't exist. This also finds out who doesn't answer.
        store.delete(f"{place.key}/{MANIFEST}")
        tensors = read_tensors(folder)
        stall_s = _QUIET_S + manifest.num_bytes / _SLOWEST_BYTES_PER_S
        found = store.ask(
            lambda: self._save(tensors, manifest, to_s3=name == REMOTE), f"saving step {manifest.step}", stall_s=stall_s
        )
        (state,) = [shard for shard in manifest.shards if shard.name == STATE]
        store.put(folder / STATE, f"{place.key}/{STATE}")
        whole = replace(manifest, shards=(*found, state))
        self._refuse_missing(place, whole)
        if not store.put_if_absent(whole.to_json(), f"{place.key}/{MANIFEST}"):
            raise StorageError(f"another writer has completed {place} meanwhile")
        fault = why_not_whole(place, whole, deep=False)
        if fault is not None:
            raise StorageError(f"{place} does not keep what is written to it: {fault}")

    def _save(self, tensors: Tensors, manifest: Manifest, *, to_s3: bool) -> tuple[Shard, ...]:
        """Let the library save, to one of its tiers; what it has handed over."""
        library, recorder = self._library, _Recorder(progress.get())
        url = filled(self._section.url).rstrip("/") if to_s3 else ""
        config = library.config(
            namespace=manifest.run_id,
            world_size=1,
            s3_path_strategy=library.s3_paths(url) if to_s3 else None,
            save_to_s3=to_s3,
            logger=_Silent(LIBRARY),
        )
        writer = library.writer(config, step=manifest.step)
        if to_s3:
            writer.client = _NoMemory()
            writer.s3_client = _RecordingS3(writer.s3_client, recorder)
        else:
            wait_s = _WAIT_S + manifest.num_bytes / _SLOWEST_BYTES_PER_S
            access = library.access(base_url=self._section.memory_daemon or DAEMON, request_timeout=wait_s, log_requests=False)
            client = library.client(
                manifest.run_id, "0", "1", config=access, steps_retained=STEPS_RETAINED, logger=_Silent(LIBRARY)
            )
            writer.client = _RecordingMemory(client, recorder)
        with rank_errors():
            save(dict(tensors), storage_writer=writer, no_dist=True)
        return recorder.shards()

    def _refuse_missing(self, place: Place, manifest: Manifest) -> None:
        """Before the manifest: what the library reports as saved must be there."""
        there = {entry.key.rpartition("/")[2]: entry.num_bytes for entry in place.store.list(f"{place.key}/")}
        for shard in manifest.shards:
            if there.get(shard.name) != shard.num_bytes:
                raise StorageError(
                    f"{shard.name} has {shard.num_bytes:,} bytes and {there.get(shard.name, 0):,} are there, though the "
                    "library has reported no failure"
                )


@dataclass(frozen=True, slots=True)
class Library:
    """What is used of Amazon's library."""

    writer: Any
    config: Any
    s3_paths: Any
    client: Any
    access: Any


def import_library() -> Library:
    """Import it. Raises MissingDependencyError."""
    try:
        from amzn_sagemaker_checkpointing.checkpointing.filesystem.writer import SageMakerTieredStorageWriter
        from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
        from amzn_sagemaker_checkpointing.config.s3_path_strategy import DefaultS3PathStrategy
        from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig
        from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import InMemoryCheckpointClient
    except ImportError as error:
        raise MissingDependencyError(
            f"checkpoint.backend=sagemaker_tiered needs the package {error.name}; pip install 'polyturn[sagemaker-checkpoints]'"
        ) from error
    return Library(
        writer=SageMakerTieredStorageWriter,
        config=SageMakerCheckpointConfig,
        s3_paths=DefaultS3PathStrategy,
        client=InMemoryCheckpointClient,
        access=InMemoryClientConfig,
    )


class _Recorder:
    """Sizes and checksums of what the library hands over, and a tick for each piece."""

    def __init__(self, watched: Progress | None) -> None:
        # Taken here: the library works in a thread of its own, which knows nothing of who waits.
        self._watched = watched
        self._found: dict[str, tuple[Any, int]] = {}

    def begin(self, name: str) -> None:
        """A file starts, perhaps again."""
        self._found[name] = hasher(), 0

    def add(self, name: str, piece: bytes) -> None:
        """The next piece of a file."""
        found, num_bytes = self._found[name]
        found.update(piece)
        self._found[name] = found, num_bytes + len(piece)
        if self._watched is not None:
            self._watched.tick(len(piece))

    def shards(self) -> tuple[Shard, ...]:
        """All of them. Raises StorageError when the library has left one out."""
        if self._found.keys() != {DATA, METADATA}:
            raise StorageError(f"the library has written {', '.join(sorted(self._found)) or 'nothing'} and no more")
        return tuple(Shard(name, num_bytes, found.hexdigest()) for name, (found, num_bytes) in sorted(self._found.items()))


class _RecordingMemory:
    """The library's client of the memory daemon."""

    def __init__(self, client: Any, recorder: _Recorder) -> None:
        self._client, self._recorder = client, recorder

    def get_or_create_namespace(self) -> Any:
        return self._client.get_or_create_namespace()

    def put_checkpoint(self, step: int, data: bytes, metadata_index: int | None = None, rank: int | None = None) -> None:
        name = DATA if metadata_index is None else METADATA
        self._recorder.begin(name)
        self._client.put_checkpoint(step=step, data=data, metadata_index=metadata_index, rank=rank)
        self._recorder.add(name, data)


class _NoMemory:
    """In place of that client where memory is not to be written to: the library then goes on with S3."""

    def get_or_create_namespace(self) -> None: ...

    def put_checkpoint(self, **_: Any) -> None:
        raise StorageError("this save is for S3 alone")


class _RecordingS3:
    """The library's client of S3."""

    def __init__(self, client: Any, recorder: _Recorder) -> None:
        self._client, self._recorder = client, recorder

    @contextlib.contextmanager
    def create_write_stream(self, s3_uri: str) -> Iterator[Any]:
        name = s3_uri.rpartition("/")[2]
        self._recorder.begin(name)
        with self._client.create_write_stream(s3_uri=s3_uri) as stream:
            yield _RecordingStream(stream, name, self._recorder)


class _RecordingStream:
    def __init__(self, stream: Any, name: str, recorder: _Recorder) -> None:
        self._stream, self._name, self._recorder = stream, name, recorder

    def write(self, piece: bytes) -> int:
        written = int(self._stream.write(piece))
        self._recorder.add(self._name, piece)
        return written


class _Silent(logging.Logger):
    """The library adds a file in /var/log to whatever logger it gets. What goes wrong is in its exceptions."""

    def addHandler(self, handler: logging.Handler) -> None:
        handler.close()

    def handle(self, record: logging.LogRecord) -> None: ...
