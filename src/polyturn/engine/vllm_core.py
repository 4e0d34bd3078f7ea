"""vLLM inside this process: built, stepped and read by the one thread that calls it. Knows no asyncio.

Only what vLLM offers from outside is used, nothing in it is replaced. Its core is asked for new tokens directly: its own layer
above that collects text, which nobody here wants, at the price of a third of the time between two tokens.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyturn.engine import vllm_plain
from polyturn.engine.base import Sleep
from polyturn.engine.vllm_arguments import exactness
from polyturn.engine.vllm_tensors import UnknownLayerError, held_tensors
from polyturn.errors import EngineError, MissingDependencyError
from polyturn.plan.engine_report import EngineReport
from polyturn.processes.garbage import put_aside
from polyturn.types import SamplingParams

SUPPORTED = "0.26 to 0.32"
"""Versions of vLLM that this was tried with."""
_WEIGHTS, _CACHE = "weights", "kv_cache"
"""What vLLM calls the memory that it puts to sleep."""
_ONE = threading.Lock()
"""Held by the engine of this process."""
_SET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""What must be so for an engine in this process."""
_USUAL = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    # Nothing of it need be reached from another machine.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    # On a CPU: GiB of keys and values; and the trainer's threads stay where they are.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What an engine in this process is built with."""

    folder: Path
    """A model folder of transformers."""
    dtype: str
    max_model_len: int
    max_num_seqs: int
    """Requests that are computed at once."""
    gpu_memory_utilization: float
    device: str
    """`cpu`, `cuda` or `cuda:N`."""
    seed: int = 0
    sleep: Sleep = "off"
    """What `sleep` gives back."""
    extra: Mapping[str, Any] | None = None
    """Further engine arguments of vLLM, which win."""


@dataclass(slots=True, eq=False)
class Sampled:
    """What a request has come to; `finish` is how it ended, None while it goes on."""

    key: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


class VllmCore:
    """One engine; vLLM's process groups are the process's own, so there is one at a time. Everything is called by one thread.

    Raises MissingDependencyError, EngineError.
    """

    def __init__(self, settings: VllmSettings) -> None:
        if not _ONE.acquire(blocking=False):
            raise EngineError(
                "there is a vLLM engine in this process already, and two would share process groups; stop it first, or use "
                "engine.kind=vllm_server"
            )
        try:
            self._build(settings)
        except BaseException:
            _ONE.release()
            raise

    def _build(self, settings: VllmSettings) -> None:
        prepare_process(settings.dtype)
        try:
            from vllm import EngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.llm_engine import LLMEngine
        except ImportError as error:
            raise MissingDependencyError(
                f"engine.kind=vllm needs vLLM ({SUPPORTED}), which can't be imported ({error}); pip install 'polyturn[vllm]'"
            ) from error
        device = torch.device(settings.device)
        if device.type == "cpu":
            vllm_plain.register()
        elif device.index is not None:
            torch.cuda.set_device(device)
        arguments = self._arguments(settings, device)
        try:
            # As its own `LLM` is built, whose trial batch the plan knows.
            config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
            if device.index:
                config.device_config.device = device  # left alone, it takes the first GPU, whichever is the current one
            self._engine: Any = LLMEngine.from_vllm_config(config, disable_log_stats=True)
            self._core: Any = self._engine.engine_core
            self._tasks = self._engine.get_supported_tasks()
            (self.model,) = self._engine.apply_model(lambda model: model)
        except TypeError as error:
            raise EngineError(f"this version of vLLM takes other arguments ({error}); known to work: {SUPPORTED}") from error
        config = self._engine.vllm_config
        self.max_model_len = int(config.model_config.max_model_len)
        self.vocab_size = int(config.model_config.get_vocab_size())
        self._open: dict[str, Sampled] = {}
        self._nap, self._asleep, self._dropped = settings.sleep, set[str](), False
        self._device, self._on_gpu = device, device.type == "cuda"
        put_aside()

    @staticmethod
    def _arguments(settings: VllmSettings, device: torch.device) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(settings.folder),
            "skip_tokenizer_init": True,
            "dtype": settings.dtype,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "seed": settings.seed,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if device.type == "cpu":
            # There vLLM can't take a request's seed back when it has computed a part of its prompt only.
            arguments |= {"quantization": vllm_plain.NAME, "enforce_eager": True, "enable_chunked_prefill": False}
        else:
            arguments |= {
                "gpu_memory_utilization": settings.gpu_memory_utilization,
                "enable_sleep_mode": settings.sleep != "off",
            }
        return arguments | dict(settings.extra or {})

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._open)

    def add(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> str:
        """Take a request in, and return the name under which it ends. Raises ValueError for one vLLM refuses."""
        from vllm import SamplingParams as VllmSampling
        from vllm.sampling_params import RequestOutputKind

        asked = VllmSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed % (1 << 63),
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"type": "token", "prompt_token_ids": list(prompt_ids)}
        processor = self._engine.input_processor
        request = processor.process_inputs("polyturn", prompt, asked, supported_tasks=self._tasks)
        processor.assign_request_id(request)
        self._core.add_request(request)
        key = str(request.request_id)
        self._open[key] = Sampled(key)
        return key

    def abort(self, keys: list[str]) -> None:
        """Drop requests; those that are finished or unknown are left alone."""
        self._core.abort_requests([key for key in keys if self._open.pop(key, None) is not None])

    def step(self) -> list[Sampled]:
        """Compute one token for everybody whose turn it is, and return those who ended.

        Hundreds of requests come by at every token while others want the interpreter too: nothing is made for any of them.
        """
        ended = []
        for output in self._core.get_output().outputs:
            sampled = self._open.get(output.request_id)
            if sampled is None:
                continue
            sampled.ids += output.new_token_ids
            if output.new_logprobs is not None:
                sampled.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                sampled.finish = str(output.finish_reason)
                ended.append(self._open.pop(output.request_id))
        return ended

    def weights(self) -> dict[str, Tensor]:
        """All weights by the names of transformers, as views: whoever fills them has replaced all that vLLM computes with.

        Raises EngineError for one that can't be seen as it is, such as of a layer that packs its weights.
        """
        try:
            found = dict(held_tensors(self.model))
        except UnknownLayerError as error:
            raise EngineError(f"{error}, so it can't be replaced in place; use engine.kind=vllm_server") from error
        own = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        for name, tensor in found.items():
            if tensor.untyped_storage().data_ptr() not in own:
                raise EngineError(
                    f"vLLM keeps {name} in a form of its own, so it can't be replaced in place; use engine.kind=vllm_server"
                )
        return found

    def report(self) -> EngineReport:
        """Memory, as vLLM found it at its start. What this version doesn't say is None; on a CPU most of it."""
        worker = self._engine.model_executor.driver_worker.worker
        runner, cache = worker.model_runner, self._engine.vllm_config.cache_config
        blocks = getattr(cache, "num_gpu_blocks", None)
        return EngineReport(
            budget_bytes=getattr(worker, "requested_memory", None),
            weights_bytes=getattr(runner, "model_memory_usage", None) if self._on_gpu else None,
            activation_bytes=getattr(worker, "peak_activation_memory", None),
            non_torch_bytes=getattr(worker, "non_torch_memory", None),
            graph_bytes=getattr(worker, "cudagraph_memory_estimate", None),
            kv_bytes=_pool_bytes(getattr(runner, "kv_caches", ())),
            blocks=blocks,
            tokens=None if blocks is None else blocks * cache.block_size,
        )

    def settle(self) -> None:
        """Wait for the GPU: whoever writes the weights works on another stream than vLLM, which reads them."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def forget(self) -> None:
        """Drop the keys and values of prompts that were kept for later. Raises EngineError if vLLM will not."""
        if not self._core.reset_prefix_cache():
            raise EngineError("vLLM did not drop its prefix cache after the weights changed; it would answer from old ones")

    # ── sleep ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def sleep(self) -> None:
        """Give back memory, which keeps its addresses, while nobody is being answered.

        vLLM puts weights and cache to sleep together. Weights that others use, or that no push brings, wait in CPU memory;
        those that others use are back when this returns.
        """
        if self._nap == "off" or self._asleep:
            return
        self.settle()
        self._engine.sleep(level=2 if self._nap == "drop_weights" else 1)
        self._asleep, self._dropped = {_WEIGHTS, _CACHE}, self._nap == "drop_weights"
        if self._nap == "cache":
            self._wake(_WEIGHTS)

    def wake_weights(self) -> None:
        """Have memory for the weights; what is in it after `drop_weights` is nothing."""
        self._wake(_WEIGHTS)

    def wake(self) -> None:
        """Have all memory again. Raises EngineError for weights that nobody has brought since they were dropped."""
        if self._dropped:
            raise EngineError(
                "the vllm engine slept and dropped its weights, and no push has brought new ones; it can't answer before"
            )
        for tag in (_WEIGHTS, _CACHE):
            self._wake(tag)

    def brought(self) -> None:
        """All weights have been replaced."""
        self._dropped = False

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            torch.cuda.empty_cache()  # what PyTorch keeps for the trainer's next step is where it goes
            # By name, one after the other: vLLM before 0.32 maps again what is there already when it is asked for everything.
            self._engine.wake_up([tag])
            self._asleep.remove(tag)

    def close(self) -> None:
        """Give back memory and process groups."""
        from vllm.distributed import cleanup_dist_env_and_memory

        with contextlib.suppress(RuntimeError):  # memory that sleeps can't be freed, and there may be too little to wake it
            for tag in tuple(self._asleep):
                self._wake(tag)
        try:
            self._core.shutdown()
            del self.model, self._core, self._engine
            cleanup_dist_env_and_memory()
        finally:
            _ONE.release()


def _pool_bytes(caches: Any) -> float | None:
    """Bytes of keys and values, whose tensors lie in lists of some depth and may share memory."""
    left, sizes = [caches], dict[int, int]()
    while left:
        one = left.pop()
        if isinstance(one, list | tuple):
            left.extend(one)
        else:
            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return float(sum(sizes.values())) or None


def prepare_process(dtype: str) -> None:
    """Set what vLLM reads from the environment for a model in `dtype`, and give it a process group nobody else can reach.

    Raises EngineError for a variable that says the opposite of what is needed.
    """
    for name, value in _SET.items():
        if os.environ.setdefault(name, value) != value:
            raise EngineError(
                f"{name}={os.environ[name]} in the environment: an engine in this process needs {value}; unset it"
            )
    for name, value in {**_USUAL, **exactness(dtype)}.items():
        os.environ.setdefault(name, value)
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
