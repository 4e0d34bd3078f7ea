"""Tensors that two processes of one machine hold in common, and how the one tells the other where they are.

On a GPU they stay where they are and are told as CUDA IPC handles, as torch makes them; the other process must see the same
GPU. On a CPU they lie in a block of shared memory that has no name in any folder: the other process opens it by the
descriptor of the first one, and it is gone when the last of the two is, however they end.

What travels is JSON: numbers, names, and handles in base64. Nothing is unpickled, and what does not fit together is refused
before anything is opened.
"""

from __future__ import annotations

import base64
import binascii
import math
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from polyturn.errors import WeightSyncError

ALIGNED = 64
"""Bytes that every tensor of a block begins at a multiple of."""
_HANDLE, _SIZE, _OFFSET, _COUNTER, _COUNTER_OFFSET, _EVENT, _SYNC = 7, 8, 9, 11, 12, 13, 14
"""Places among the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBlock:
    """Shared memory of a process: the descriptor `descriptor` of process `pid`, which was made under the random `name`."""

    pid: int
    descriptor: int
    name: str
    num_bytes: int

    def open(self) -> Tensor:
        """The bytes, for reading and writing. Raises WeightSyncError when they can't be reached, or are others."""
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WeightSyncError(
                f"the engine's weights can't be opened at {path} ({error.strerror}); trainer and engine must be processes of "
                "one user on one machine"
            ) from error
        try:
            if str(Path(f"/proc/self/fd/{descriptor}").readlink()) != f"/memfd:{self.name} (deleted)":
                raise WeightSyncError(f"{path} is not the engine's weights: process {self.pid} is another one by now")
            if os.fstat(descriptor).st_size != self.num_bytes:
                raise WeightSyncError(f"{path} does not have the {self.num_bytes} bytes of the engine's weights")
            return torch.frombuffer(mmap.mmap(descriptor, self.num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBlock:
    """Memory of a GPU, as a CUDA IPC handle. `counter` is what tells its owner that it is still in use."""

    handle: str
    num_bytes: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    waits: bool

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> CudaBlock:
        """The handle of all of `storage`. Raises RuntimeError for memory of an allocator that can't share it."""
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        _, told = reductions.reduce_tensor(whole)  # type: ignore[no-untyped-call]
        return cls(
            handle=_text(told[_HANDLE]),
            num_bytes=told[_SIZE],
            offset=told[_OFFSET],
            counter=_text(told[_COUNTER]),
            counter_offset=told[_COUNTER_OFFSET],
            event=_text(told[_EVENT]),
            waits=bool(told[_SYNC]),
        )

    def open(self, device: torch.device) -> Tensor:
        """The bytes, on `device` of this process. Raises WeightSyncError when CUDA will not."""
        try:
            found: Tensor = reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
                Tensor,
                (self.num_bytes,),
                (1,),
                0,
                torch.storage.TypedStorage,
                torch.uint8,
                device.index,
                _bytes(self.handle),
                self.num_bytes,
                self.offset,
                False,
                _bytes(self.counter),
                self.counter_offset,
                _bytes(self.event),
                self.waits,
            )
        except RuntimeError as error:
            first = next(iter(str(error).splitlines()), "")
            raise WeightSyncError(f"the engine's weights can't be opened on {device} ({first})") from error
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor lies: in the block of this number, from its element `offset` on.

    Of one that is cut over workers by the vocabulary, these are the rows from `first_row` on.
    """

    block: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    first_row: int = 0
    of_rows: bool = False
    """Whether it is cut so."""

    @property
    def end(self) -> int:
        """Bytes of the block that it reaches into."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (self.offset + last + 1) * _dtype(self.dtype).itemsize if math.prod(self.shape) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensors:
    """Tensors by name. `identity` is another one each time that an engine shares its own; `gpu` is a GPU's UUID."""

    identity: str
    gpu: str | None
    blocks: tuple[MemoryBlock | CudaBlock, ...]
    places: Mapping[str, TensorPlace]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        blocks: Mapping[int, MemoryBlock | CudaBlock],
        gpu: str | None,
        first_rows: Mapping[str, int] | None = None,
    ) -> SharedTensors:
        """These tensors; `blocks` by where their storages begin. `first_rows` of those that are cut by the vocabulary."""
        cut = first_rows or {}
        numbers = {begin: number for number, begin in enumerate(blocks)}
        places = {
            name: TensorPlace(
                block=numbers[tensor.untyped_storage().data_ptr()],
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                offset=int(tensor.storage_offset()),
                first_row=cut.get(name, 0),
                of_rows=name in cut,
            )
            for name, tensor in tensors.items()
        }
        return cls(identity=secrets.token_hex(8), gpu=gpu, blocks=tuple(blocks.values()), places=places)

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return {
            "identity": self.identity,
            "gpu": self.gpu,
            "blocks": [asdict(block) for block in self.blocks],
            "places": {name: asdict(place) for name, place in self.places.items()},
        }

    @classmethod
    def from_json(cls, given: object) -> SharedTensors:
        """Raises WeightSyncError with a sentence for anything that is no such thing."""
        try:
            return cls._read(given)
        except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
            raise WeightSyncError(
                f"an engine told where its weights lie in a way that can't be read ({type(error).__name__}: {error})"
            ) from error

    @classmethod
    def _read(cls, given: Any) -> SharedTensors:
        gpu = given["gpu"]
        if not isinstance(given["identity"], str) or not (gpu is None or isinstance(gpu, str)):
            raise ValueError("identity and gpu are words")
        kind = MemoryBlock if gpu is None else CudaBlock
        blocks: list[MemoryBlock | CudaBlock] = [_checked(kind(**block)) for block in given["blocks"]]
        places: dict[str, TensorPlace] = {}
        for name, told in given["places"].items():
            place = _checked(TensorPlace(**{**told, "shape": tuple(told["shape"]), "stride": tuple(told["stride"])}))
            if place.block >= len(blocks) or place.end > blocks[place.block].num_bytes:
                raise ValueError(f"{name} reaches beyond its block")
            places[name] = place
        return cls(identity=given["identity"], gpu=gpu, blocks=tuple(blocks), places=places)

    def rows_of(self, name: str) -> slice | None:
        """The rows that a tensor is, of one that is cut by the vocabulary; None of others."""
        place = self.places[name]
        return slice(place.first_row, place.first_row + place.shape[0]) if place.of_rows else None

    def open(self) -> dict[str, Tensor]:
        """The tensors, as views of what the other process holds. Raises WeightSyncError when they can't be reached."""
        device = None if self.gpu is None else _device_of(self.gpu)
        opened = [block.open() if isinstance(block, MemoryBlock) else block.open(_known(device)) for block in self.blocks]
        found: dict[str, Tensor] = {}
        for name, place in self.places.items():
            storage = opened[place.block].untyped_storage()
            empty: Any = torch.empty(0, dtype=_dtype(place.dtype), device=storage.device)
            found[name] = empty.set_(storage, place.offset, place.shape, place.stride)
        return found


def move_to_shared_memory(parameters: Sequence[Tensor]) -> tuple[MemoryBlock, Tensor]:
    """Move the numbers of `parameters`, which keep their shapes, into one block. Returns it, and its bytes.

    Those that share a storage share it after. Raises WeightSyncError when there is no room. The block lives as long as this
    process, or any that opened it.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in parameters}
    starts, size = dict[int, int](), 0
    for begin, storage in storages.items():
        starts[begin] = size
        size += -(-storage.nbytes() // ALIGNED) * ALIGNED
    block, memory = _new_block(max(size, ALIGNED))
    for begin, storage in storages.items():
        source = torch.empty(0, dtype=torch.uint8).set_(storage)
        memory[starts[begin] : starts[begin] + storage.nbytes()].copy_(source)
    for tensor in parameters:
        first = starts[tensor.untyped_storage().data_ptr()] // tensor.element_size() + tensor.storage_offset()
        empty: Any = torch.empty(0, dtype=tensor.dtype)
        tensor.data = empty.set_(memory.untyped_storage(), first, tensor.shape, tensor.stride())
    return block, memory


def uuid_of(device: torch.device) -> str:
    """The UUID of a GPU, by which every process knows it, whatever it may see of the others."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _new_block(num_bytes: int) -> tuple[MemoryBlock, Tensor]:
    if not hasattr(os, "memfd_create"):
        raise WeightSyncError("this system has no memory that two processes can share so; use weight_sync.mode=nccl")
    name = f"polyturn-{secrets.token_hex(8)}"
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        # Asked for now: memory that is lacking when it is first written to would kill the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise WeightSyncError(f"{num_bytes} bytes of shared memory can't be had ({error.strerror})") from error
    memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    return MemoryBlock(pid=os.getpid(), descriptor=descriptor, name=name, num_bytes=num_bytes), memory


def _device_of(gpu: str) -> torch.device:
    """The GPU with this UUID. Raises WeightSyncError when this process does not see it."""
    for index in range(torch.cuda.device_count()):
        if uuid_of(torch.device("cuda", index)) == gpu:
            return torch.device("cuda", index)
    raise WeightSyncError(
        f"the engine's weights are on the GPU {gpu}, which the trainer does not see; one copy of them needs one GPU for both: "
        "give trainer.devices and engine.devices the same number"
    )


def _known(device: torch.device | None) -> torch.device:
    assert device is not None, "memory of a GPU has one"
    return device


def _checked(read: Any) -> Any:
    """A record whose fields have the types that they should. Raises ValueError."""
    for name, kind in type(read).__annotations__.items():
        value = getattr(read, name)
        if kind == "int" and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62):
            raise ValueError(f"{name}={value!r} is no number that can be")
        if kind == "str" and not isinstance(value, str):
            raise ValueError(f"{name}={value!r} is no word")
        if kind == "bool" and not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is neither true nor false")
        if kind.startswith("tuple") and not all(type(part) is int and 0 <= part < 1 << 62 for part in value):
            raise ValueError(f"{name}={value!r} has other than numbers")
    if isinstance(read, TensorPlace):
        if len(read.shape) != len(read.stride):
            raise ValueError(f"a shape of {len(read.shape)} and a stride of {len(read.stride)} numbers")
        _dtype(read.dtype)
    if isinstance(read, CudaBlock):
        for text in (read.handle, read.counter, read.event):
            _bytes(text)
    return read


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of numbers")
    return found


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
