"""What Polyturn adds inside a vLLM worker: a weight-transfer backend, and answers to what a bridge asks.

A server that a run starts names `Extension` as its worker extension, and `polyturn` as its weight-transfer backend. Importing
this module registers the backend with vLLM's factory; both are vLLM's own ways of being extended. The backend receives from
the same group, in the same buckets, as our own engine server does (`weight_sync.transfer`): NCCL on GPUs, gloo otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from polyturn.engine.vllm_shared import WorkerShare
from polyturn.engine.vllm_tensors import (
    UnknownLayerError,
    adapter_tensors,
    aliases,
    described_tensors,
    held_tensors,
    plain_tensors,
)
from polyturn.errors import WeightSyncError
from polyturn.weight_sync.base import checksum
from polyturn.weight_sync.labels import BACKEND, BROKEN_LABEL, DEFAULT_LABEL, WEIGHT_LABEL
from polyturn.weight_sync.shared_tensors import uuid_of
from polyturn.weight_sync.transfer import BUCKET_BYTES, NUM_BUFFERS, InitInfo, TransferGroup, UpdateInfo, receive

KEEP_PACKED_HEAD = "POLYTURN_TEST_KEEP_PACKED_HEAD"
"""Set in tests: leave the packed copy of a tied head as a native reload leaves it, to see that this is found."""


_SHARE = "_polyturn_share"
"""Attribute of a worker with what it shares."""


@dataclass
class _Init(WeightTransferInitInfo):  # type: ignore[misc]
    """The keys of `InitInfo`; vLLM makes one of these from the JSON that came."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = BUCKET_BYTES
    packed_num_buffers: int = NUM_BUFFERS
    backend: str = "gloo"
    timeout_s: float = 60.0


@dataclass
class _Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The keys of `UpdateInfo`, and the version that the update makes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    version: str = field(default=DEFAULT_LABEL)


class PolyturnTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Receives whole tensors under their checkpoint names, into the model's own tensors where these are all there is.

    Elsewhere (tensor-parallel parts, packed and quantized layers, layers that are not known here) vLLM reloads layer by layer,
    which takes some hundred microseconds a tensor.
    """

    init_info_cls = _Init
    update_info_cls = _Update
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.label = os.environ.get(WEIGHT_LABEL, DEFAULT_LABEL)
        """What the weights are called; `BROKEN_LABEL` when an update left parts of two versions."""
        self._coming: str | None = None
        self._touched = False
        self._open = False
        self._own: dict[str, torch.Tensor] | None = None
        """Where the tensors of the open update go; None where layers are reloaded."""
        self._expected: tuple[UpdateInfo, dict[str, torch.Tensor]] | None = None
        """What came the last time: it comes again, and describing three hundred tensors takes milliseconds."""
        self._group: TransferGroup | None = None
        self._info: InitInfo | None = None

    def init_transfer_engine(self, init_info: _Init) -> None:
        """Join the trainer's group, and leave the one before."""
        self.shutdown()
        info = InitInfo.from_json(vars(init_info))
        parallel = self.parallel_config
        rank = getattr(parallel, "data_parallel_index", 0) * parallel.world_size + parallel.rank
        info = replace(info, rank_offset=info.rank_offset + rank)
        self._group = TransferGroup(info, torch.device(self.device) if info.backend == "nccl" else torch.device("cpu"))
        self._info = info

    def start_weight_update(self) -> None:
        """Get ready to take every layer anew. What an update before left half-way is put back first."""
        if self._open:
            self.put_back()
        self._own = plain_tensors(self.model)
        if self._own is None:
            initialize_layerwise_reload(self.model)
        self._open = True

    def receive_weights(self, update_info: _Update) -> None:
        """Receive all tensors. An update that does not come through whole leaves the layers as they were, or new: mixed."""
        group, info = self._group, self._info
        if group is None or info is None:
            raise RuntimeError("there is no weight transfer group; /init_weight_transfer_engine comes first")
        coming = self._described(update_info)
        if self._own is not None:
            _refuse_other(coming, self._own)
        self._coming = update_info.version
        self._touched = True
        try:
            receive(
                group,
                coming,
                self._load,
                bucket_bytes=info.packed_buffer_size_bytes,
                until=time.monotonic() + info.timeout_s,
            )
        except BaseException:
            self.put_back()
            self.shutdown()
            raise

    def finish_weight_update(self) -> None:
        """Put the last layers in place; the weights have the new version's name from then on."""
        if self._own is None:
            finalize_layerwise_reload(self.model, self.model_config)
            if not os.environ.get(KEEP_PACKED_HEAD):
                _pack_tied_heads(self.model)
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)  # what went wrong on the GPU belongs to this push
        self._open = self._touched = False
        self._own = None
        if self._coming is not None:
            self.label, self._coming = self._coming, None

    def put_back(self) -> None:
        """Give up an open update. Layers that did not come whole get their tensors back, so that nothing is without any."""
        if not self._open:
            return
        if self._own is None:
            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():
                    info.loaded_weights.clear()
                    info.load_numel = 0
            finalize_layerwise_reload(self.model, self.model_config)
        if self._touched:
            self.label = BROKEN_LABEL
        self._coming, self._open, self._touched, self._own = None, False, False, None

    def _described(self, update_info: _Update) -> dict[str, torch.Tensor]:
        """What comes, as meta tensors."""
        told = UpdateInfo(names=update_info.names, dtype_names=update_info.dtype_names, shapes=update_info.shapes)
        if self._expected is None or self._expected[0] != told:
            self._expected = told, told.tensors()
        return self._expected[1]

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a bucket where it belongs."""
        own = self._own
        if own is None:
            self.model.load_weights(tensors.items())
            return
        with torch.no_grad():
            torch._foreach_copy_([own[name] for name in tensors], list(tensors.values()))

    def shutdown(self) -> None:
        """Leave the group. Its connections close with it, and the trainer notices."""
        group, self._group, self._info = self._group, None, None
        if group is not None:
            group.cut()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Nothing calls it: the trainer sends with `weight_sync.transfer.send`. vLLM up to 0.2x wants it to be there."""
        raise NotImplementedError("weights are sent by polyturn.weight_sync.transfer.send")


class Extension:
    """Methods that `/collective_rpc` reaches, on every worker. What they return is JSON."""

    def polyturn_state(self) -> dict[str, Any]:
        """What the weights are called, where they are, and the identity under which they are shared."""
        worker: Any = self
        backend = worker.weight_transfer_engine
        known = isinstance(backend, PolyturnTransfer)
        device = torch.device(worker.device)
        return {
            "weight_version": backend.label if known else os.environ.get(WEIGHT_LABEL, DEFAULT_LABEL),
            "device": device.type,
            "gpu": uuid_of(device) if device.type == "cuda" else None,
            "receives": known,
            "shared": getattr(getattr(worker, _SHARE, None), "identity", None),
        }

    def polyturn_describe(self) -> dict[str, Any]:
        """Names, types and shapes of all weights, which names are the same tensor, and `polyturn_state`."""
        model, unknown = _model(self), None
        try:
            weights, tied = described_tensors(model), aliases(model)
        except UnknownLayerError as error:
            weights, tied, unknown = {}, {}, str(error)
        return {"weights": UpdateInfo.of(weights).to_json(), "aliases": tied, "unknown": unknown, **self.polyturn_state()}

    def polyturn_checksums(self) -> dict[str, Any]:
        """Checksums of what the layers compute with, by name, as text: they have 64 bits. Zeros have no sign."""
        with torch.no_grad():
            return {
                "checksums": {name: str(checksum(tensor, signed_zeros=False)) for name, tensor in held_tensors(_model(self))}
            }

    def polyturn_adapters(self) -> dict[str, Any]:
        """The adapters that were loaded last, as this worker holds them: their type, and checksums by PEFT's names.

        vLLM multiplies the second matrix by alpha / rank when it loads it.
        """
        manager: Any = self
        manager = manager.model_runner.lora_manager._adapter_manager
        loaded = manager.list_adapters()
        newest = loaded[max(loaded)]
        dtype, sums = "float32", {}
        for name, matrix in adapter_tensors(newest, getattr(_model(self), "packed_modules_mapping", {})):
            dtype, sums[name] = str(matrix.dtype).removeprefix("torch."), str(checksum(matrix, signed_zeros=False))
        return {"dtype": dtype, "checksums": sums}

    def polyturn_stamp(self, label: str) -> dict[str, Any]:
        """Call the weights `label`."""
        worker: Any = self
        os.environ[WEIGHT_LABEL] = label
        if isinstance(worker.weight_transfer_engine, PolyturnTransfer):
            worker.weight_transfer_engine.label = label
        return self.polyturn_state()

    def polyturn_share(self) -> dict[str, Any]:
        """Where the trainer finds the weights (`SharedTensors`), or why they can't be shared."""
        worker: Any = self
        share = getattr(worker, _SHARE, None)
        if share is None:
            share = WorkerShare(_model(self), torch.device(worker.device))
            setattr(worker, _SHARE, share)
        try:
            return {"shared": share.share().to_json(), "refused": None}
        except WeightSyncError as error:
            return {"shared": None, "refused": str(error)}

    def polyturn_settle(self) -> dict[str, Any]:
        """Wait until the device has computed all that it was given. Returns `polyturn_state`."""
        worker: Any = self
        if torch.device(worker.device).type == "cuda":
            torch.cuda.synchronize(worker.device)
        return self.polyturn_state()

    def polyturn_put_back(self) -> dict[str, Any]:
        """Give up an update that somebody left open. Returns `polyturn_state`."""
        worker: Any = self
        backend = worker.weight_transfer_engine
        if isinstance(backend, PolyturnTransfer):
            backend.put_back()
            if getattr(worker, "_weight_update_active", False):
                # The update that the worker has open has nothing left to load: this only closes it.
                backend.start_weight_update()
                worker.finish_weight_update()
        return self.polyturn_state()


def _refuse_other(coming: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, before anything changes, unless `coming` fills every tensor of `own`, by one of its names."""
    wrong = [name for name, tensor in coming.items() if name not in own or own[name].shape != tensor.shape]
    filled = {own[name].data_ptr() for name in coming if name in own}
    wrong += [name for name, tensor in own.items() if tensor.data_ptr() not in filled]
    if wrong:
        raise ValueError(f"what comes does not fill this model's tensors: {wrong[0]} is of another shape, or in one only")


def _model(worker: Any) -> Any:
    return worker.model_runner.get_model()


def _pack_tied_heads(model: Any) -> None:
    """On CPUs a head keeps a packed copy of its weight, and a tied one gets no new copy when the embedding is reloaded."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


WeightTransferEngineFactory.register_engine(BACKEND, PolyturnTransfer)
