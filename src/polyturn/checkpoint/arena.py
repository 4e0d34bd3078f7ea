"""Shared memory that the tensors of a state are copied to, so that training can go on while another process writes them.

The memory belongs to no name in any folder: it is gone with the last process that holds it, however that ends. It is kept from
one save to the next, since copying into fresh pages takes several times as long; on machines with a GPU its pages are pinned,
so that the device copies at full speed and beside its other work.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_ALIGNED = 256
_POPULATE_WRITE = 23
"""Linux's advice to bring in all pages of a mapping, to be written to."""
_MOST_SHARE = 0.9
"""Of the free memory that staging takes."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor itself, in `memory`."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        num_bytes = dtype.itemsize * torch.Size(self.shape).numel()
        return memory[self.offset : self.offset + num_bytes].view(dtype).view(self.shape)

    def alone(self, memory: torch.Tensor) -> torch.Tensor:
        """The same bytes as a tensor of its own: torch saves what a view is of, so it copies one before it writes it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        count = torch.Size(self.shape).numel()
        if not count:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(memory.numpy(), dtype=dtype, offset=self.offset, count=count).view(self.shape)


def lay_out(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Slot], int]:
    """A place for each tensor, and the bytes they take together. Of a sharded tensor it is the whole one's."""
    slots, end = [], 0
    for path, tensor in tensors.items():
        slots.append(Slot(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
    return slots, end


class Arena:
    """The driver's side: `stage` copies, and returns when the device has done so."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.size = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[Any, Any] | None = None

    def reserve(self, size: int, *, pinned: bool = False) -> None:
        """Have room for `size` bytes, in pages that are there. Raises OSError when there is no memory for them."""
        if size <= self.size:
            return
        self.close()
        free = free_memory()
        if free is not None and size > free * _MOST_SHARE:
            # Asked for all the same, the system would end some process, and perhaps this one, to find it.
            raise OSError(errno.ENOMEM, f"{size:,} bytes of memory are needed and {free:,} are free")
        self.descriptor = _nameless(size)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, size)  # otherwise the first copy pays for every page
            self._memory = map_memory(self.descriptor, size, touched=True)
        except BaseException:
            self.close()
            raise
        self.size = size
        # Where the system lets nobody pin that much, copies are slower, and right all the same.
        if pinned and _cuda("cudaHostRegister", self._memory.data_ptr(), size, 0):
            # Also when nobody closes it: CUDA refuses to pin the same addresses again, which the next mapping may well get.
            self._unpin = weakref.finalize(self, _cuda, "cudaHostUnregister", self._memory.data_ptr())
            self._unpin.atexit = False

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> list[Slot]:
        """Copy `tensors` and say where they lie. Sharded ones are gathered: all ranks must ask for the same ones, in order.

        Whoever trains must not change them meanwhile. Raises OSError for too little memory.
        """
        slots, size = lay_out(tensors)
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        self.reserve(size, pinned=bool(devices))
        lanes = {device: _Lane(device) for device in devices}
        with torch.no_grad():
            for slot, tensor in zip(slots, tensors.values(), strict=True):
                whole = whole_tensor(tensor)
                if whole.device in lanes:
                    lanes[whole.device].copy(whole, slot.view(self._memory))
                else:
                    slot.view(self._memory).copy_(whole)
        for lane in lanes.values():
            lane.wait()
        return slots

    @property
    def pinned(self) -> bool:
        """Whether its pages are locked, so that a GPU copies at full speed."""
        return self._unpin is not None

    @property
    def memory(self) -> torch.Tensor:
        """All of it, as bytes."""
        return self._memory

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        descriptor, self.descriptor, self.size = self.descriptor, -1, 0
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        if descriptor >= 0:
            os.close(descriptor)


def _cuda(name: str, *arguments: int) -> bool:
    """Whether a call of CUDA's runtime succeeds. What fails here fails nobody else."""
    if int(getattr(torch.cuda.cudart(), name)(*arguments)) == 0:  # type: ignore[no-untyped-call]
        return True
    # CUDA keeps an error until somebody asks for it, and torch would raise it after its next kernel, whatever that is.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


class _Lane:
    """A stream of its own for the copies from one GPU, beside whatever else it does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gradient; a sharded one is gathered, which is a collective of all ranks."""
    gather: Any = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor if gather is None else gather()
    return whole.detach()


def free_memory() -> int | None:
    """Bytes that this machine, or the group of processes that this one belongs to, can still give; None if nobody says."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(found) if found else None


def map_memory(descriptor: int, size: int, *, touched: bool = False) -> torch.Tensor:
    """The bytes behind `descriptor`, which another process may hold too. Raises OSError.

    `touched`: every page is made known to this process now; otherwise the first copy takes twice as long as the next ones.
    """
    mapping = mmap.mmap(descriptor, size)
    # The tensor keeps the mapping, and the mapping the memory, also when the descriptor is closed.
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if touched:
        try:
            mapping.madvise(_POPULATE_WRITE)
        except (OSError, AttributeError):  # a system that knows no such advice
            memory[:: mmap.PAGESIZE].zero_()
    return memory


def _nameless(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("polyturn-checkpoint", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
