"""A vLLM worker's own tensors, told to the trainer, whose parameters then are views of them.

On a CPU they are moved into shared memory first. On a GPU they stay, since compiled code and captured graphs know where they
are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyturn.engine.vllm_tensors import derives, not_covered, own_parts
from polyturn.errors import WeightSyncError
from polyturn.weight_sync.base import named
from polyturn.weight_sync.shared_tensors import CudaBlock, MemoryBlock, SharedTensors, move_to_shared_memory, uuid_of


class WorkerShare:
    """What a worker with `model` on `device` shares. `identity` is that of the newest time."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.identity: str | None = None
        self._model = model
        self._device = device
        self._moved: tuple[MemoryBlock, Tensor] | None = None

    @torch.no_grad()
    def share(self) -> SharedTensors:
        """All that this worker has of the model's weights, by checkpoint name.

        Raises WeightSyncError for what can't be one copy with another's.
        """
        self._refuse()
        if self._device.type == "cpu" and self._moved is None:
            self._moved = move_to_shared_memory(list(self._model.parameters()))
        tensors, first_rows = own_parts(self._model)
        gpu = None if self._moved else uuid_of(self._device)
        shared = SharedTensors.of(tensors, self._blocks(tensors), gpu, first_rows)
        self.identity = shared.identity
        return shared

    def _blocks(self, tensors: dict[str, Tensor]) -> dict[int, MemoryBlock | CudaBlock]:
        """The blocks by where they begin."""
        if self._moved is not None:
            block, memory = self._moved
            return {memory.untyped_storage().data_ptr(): block}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
        try:
            return {begin: CudaBlock.of(storage) for begin, storage in storages.items()}
        except RuntimeError as error:
            first = next(iter(str(error).splitlines()), "")
            raise WeightSyncError(
                f"vLLM's memory can't be shared with another process ({first}); memory of its sleep mode, and segments that "
                "grow (PYTORCH_CUDA_ALLOC_CONF), are of that kind"
            ) from error

    def _refuse(self) -> None:
        """Raise WeightSyncError unless every number of every weight has a name, under which it lies as the layer uses it."""
        gaps = not_covered(self._model)
        if gaps:
            raise WeightSyncError(
                f"{len(gaps)} of the engine's parameters are not, or not as a whole, tensors of a checkpoint, so there can't "
                f"be one copy of them: {named(gaps)}; use weight_sync.mode=restart, or nccl with a GPU for each"
            )
        derived = [name for name, module in self._model.named_modules() if derives(module)]
        if derived:
            raise WeightSyncError(
                f"{len(derived)} layers of vLLM compute with values that they derived from their weights at the start, so "
                f"there can't be one copy of them: {named(derived)}; use weight_sync.mode=restart, or nccl with a GPU for each"
            )
        own = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        parts, _ = own_parts(self._model)
        apart = [name for name, tensor in parts.items() if tensor.untyped_storage().data_ptr() not in own]
        if apart:
            raise WeightSyncError(
                f"vLLM keeps {len(apart)} tensors in a form of its own, so there can't be one copy of them: {named(apart)}; "
                "use weight_sync.mode=restart, or nccl with a GPU for each"
            )
