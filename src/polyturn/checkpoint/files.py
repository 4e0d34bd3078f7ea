"""The files of a checkpoint: tensors in PyTorch Distributed Checkpoint format, the rest of the state as `state.json`.

    step_00000042/
      .metadata  __0_0.distcp    what torch.distributed.checkpoint reads, at any world size
      state.json                 everything that is no tensor
      MANIFEST.json              sizes and checksums, written last; see `polyturn.storage`

Where Amazon's library has written, `metadata.metadata` and `checkpoint.pt` stand for the first two: the same classes describe
the same tensors, laid out as torch does. Nothing is unpickled but descriptions, and of them only torch's own classes.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from polyturn.checkpoint.tree import Tensors, join, paths_in
from polyturn.errors import CheckpointError, ResourceError
from polyturn.storage.parallel import each
from polyturn.storage.stores.sagemaker_names import DATA, METADATA

STATE = "state.json"
_FORMAT = 1
_MOST_THREADS = 4
_LEAST_BYTES = 64 << 20
"""Of a file that is one of several."""
_LIBRARY = "amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint._extension": None,
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}
"""Names that the description of a checkpoint may refer to, by module; None: all of the module's own."""

# Nobody else takes part, as is meant. Once and for all: threads write tiers side by side, and Python's filters belong to the
# process, so what one of them puts back after itself would undo another's.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, KeyError, AssertionError, pickle.UnpicklingError)


def write_files(folder: Path, tensors: Mapping[str, torch.Tensor], rest: Any, *, threads: int | None = None) -> None:
    """Write both parts of a state into `folder`, which exists and is empty. Raises what went wrong, OSError for the disk.

    Tensors of many bytes go to several files, by as many `threads`; None: as many as this machine spares.
    """
    with rank_errors():
        save(dict(tensors), storage_writer=_Writer(folder, spare_threads() if threads is None else threads), no_dist=True)
    whole = {"format": _FORMAT, "state": rest}
    with (folder / STATE).open("w", encoding="utf-8") as file:
        json.dump(whole, file, allow_nan=False)
        file.flush()


def read_rest(folder: Path) -> Any:
    """The part of a state that is no tensor. Raises ResourceError when it can't be read, CheckpointError for another format."""
    try:
        whole = json.loads((folder / STATE).read_text(encoding="utf-8"))
        found, rest = whole["format"], whole["state"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResourceError(
            f"{folder / STATE} can't be read ({type(error).__name__}: {error}); choose another checkpoint"
        ) from error
    if found != _FORMAT:
        raise CheckpointError(
            f"{folder} has format {found}, and this version of Polyturn reads {_FORMAT}; use the version that wrote it"
        )
    return rest


def read_state(folder: Path, rest: Any, into: Mapping[str, torch.Tensor] | None = None) -> Any:
    """The state whose rest is `rest`, or the part of one: with the tensors that belong into it, read from `folder`.

    Where `into` has a tensor of a path, that one is filled, whatever its device, sharded ones included, each rank its shard;
    the others come in CPU memory.

    Raises:
        CheckpointError: a tensor that has another shape or type in `into`, or that the checkpoint doesn't hold.
        ResourceError: the files can't be read.
    """
    paths, reader = paths_in(rest), _Reader(folder)
    known = reader.described()
    targets: Tensors = {}
    for path in sorted(paths):
        if path not in known:
            raise CheckpointError(f"{folder} does not hold the tensor {path}; it is no whole checkpoint, so choose another")
        given, (shape, dtype) = None if into is None else into.get(path), known[path]
        if given is not None and (tuple(given.shape), given.dtype) != (shape, dtype):
            raise CheckpointError(
                f"{path} is {tuple(given.shape)} of {given.dtype} here and {shape} of {dtype} in {folder}: the state is of "
                "another model or optimizer; resume with the recipe that it was saved with, or load less of it with --load"
            )
        targets[path] = torch.empty(shape, dtype=dtype) if given is None else given.detach()
    try:
        if targets:
            with rank_errors():
                load(targets, storage_reader=reader, no_dist=True)
    except _UNREADABLE as error:
        raise ResourceError(f"{folder} can't be read ({type(error).__name__}: {error}); choose another checkpoint") from error
    return join(rest, targets)


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a checkpoint, by path, in CPU memory. Raises ResourceError."""
    found: Tensors = read_state(folder, {path: {"tensor": path} for path in _Reader(folder).described()})
    return found


def spare_threads() -> int:
    """A quarter of the cores that this process may use, as the trainer's need the others, and no more than a disk can feed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores // 4))


class _Writer(FileSystemWriter):
    """Torch's, with several files at once, and with the errors of all of them.

    Its own `thread_count` loses what goes wrong in a thread: the tensors of that file would be missing without a word.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        self._threads = threads

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `FileSystemWriter.write_data`."""
        write = super().write_data
        parts = _parts(plan.items, self._threads)
        if len(parts) == 1:
            return write(plan, planner)
        prefix = plan.storage_data.prefix
        plans = [
            replace(plan, items=items, storage_data=_StoragePrefix(f"{prefix}{number}_")) for number, items in enumerate(parts)
        ]
        written: Future[list[WriteResult]] = Future()
        found = each(lambda part: write(part, planner).wait(), plans, threads=self._threads)
        written.set_result([result for results in found for result in results])
        return written


def _parts(items: Sequence[WriteItem], most: int) -> list[list[WriteItem]]:
    """The tensors of each file, of about as many bytes, and no file that isn't worth a thread."""
    sizes = [_num_bytes(item) for item in items]
    count = max(1, min(most, sum(sizes) // _LEAST_BYTES))
    parts: list[list[WriteItem]] = [[] for _ in range(count)]
    held = [0] * count
    for size, place in sorted(((size, place) for place, size in enumerate(sizes)), reverse=True):
        lightest = held.index(min(held))
        parts[lightest].append(items[place])
        held[lightest] += size
    return [part for part in parts if part]


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


class _Reader(FileSystemReader):
    """Torch's, with a description that can name nothing but descriptions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `FileSystemReader.read_metadata`. Raises ResourceError."""
        path = self._folder / ".metadata"
        if not path.exists() and (self._folder / METADATA).exists():
            path = self._folder / METADATA
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"a {type(metadata).__name__}")
            if path.name == METADATA:
                metadata.storage_data = {index: place.in_file() for index, place in metadata.storage_data.items()}
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, IndexError, KeyError) as error:
            raise ResourceError(f"{path} can't be read ({type(error).__name__}: {error}); choose another checkpoint") from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def described(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of every tensor, by path."""
        entries = self.read_metadata().state_dict_metadata
        return {
            path: (tuple(entry.size), entry.properties.dtype)
            for path, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }


@dataclass
class _LibraryPlace:
    """Stands for the class with which Amazon's library says where a tensor lies."""

    rank: int
    offset: int
    length: int

    def in_file(self) -> _StorageInfo:
        """The same in torch's words. Raises ValueError for a rank that has written no file here."""
        if self.rank != 0:
            raise ValueError(f"a tensor of rank {self.rank}")
        return _StorageInfo(DATA, self.offset, self.length)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_LIBRARY, "_SageMakerStorageInfo"):
            return _LibraryPlace
        if module in _ALLOWED and "." not in name:
            names, found = _ALLOWED[module], getattr(importlib.import_module(module), name)
            if name in names if names is not None else getattr(found, "__module__", None) == module:
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the description of a checkpoint")


@contextmanager
def rank_errors() -> Iterator[None]:
    """Around torch's save and load: errors are those of this rank, as nobody else takes part."""
    try:
        yield
    except CheckpointException as error:  # it would pass every `except Exception`
        raise next((wrapped[0] for wrapped in error.failures.values()), RuntimeError(str(error))) from None
