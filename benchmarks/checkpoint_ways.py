"""Ways to save a state, each behind the same three words, for `checkpoint.py`: save, recover, close."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from polyturn.checkpoint.checkpointer import Checkpointer
from polyturn.checkpoint.files import rank_errors, read_rest, read_state
from polyturn.checkpoint.places import memory_root, tiers_of
from polyturn.checkpoint.sagemaker import import_library
from polyturn.checkpoint.tree import split
from polyturn.checkpoint.writing import Settings
from polyturn.config.checkpoint_section import CheckpointEvery, CheckpointKeep, CheckpointSection

DEADLINE_S = 900.0
BUCKET = "bench"


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """All of them."""
    return [one for tensors in state.values() for one in tensors.values()]


class Way(Protocol):
    """`save` returns when training may go on; what it returns waits, and gives the seconds until it was durable, by tier."""

    name = ""
    goes_on = True
    """Whether training goes on while it saves."""

    def save(self, step: int) -> Callable[[], dict[str, float]]:
        """Save."""

    def end(self) -> None:
        """Give back the memory that saving takes."""

    def recover(self) -> dict[str, Any]:
        """How long it takes to come back."""
        return {}

    def close(self) -> None:
        """Remove all that is left."""


class Ours(Way):
    """A copy to pinned shared memory; a process writes it to all tiers."""

    name = "ours"

    def __init__(self, state: dict[str, Any], folder: Path, tiers: list[str], endpoint: str | None) -> None:
        self._state, self._folder, self._tier_names = state, folder, tiers
        url = f"s3://{BUCKET}/ours-{uuid.uuid4().hex[:8]}" if "s3" in tiers else None
        every = CheckpointEvery(memory=1 if "memory" in tiers else None, disk=1)
        keep = CheckpointKeep(memory=1, disk=1, s3=1)
        self._section = CheckpointSection(every=every, keep=keep, url=url, endpoint_url=endpoint if url else None)
        settings = Settings(run_id="bench", checkpoints=folder / "checkpoints", section=self._section)
        self._saver = Checkpointer(settings, say=print, separate=True, log=folder / "writer.log")
        self._saver.start()
        start = time.perf_counter()
        self._saver.reserve(state)
        self._reserve_s = time.perf_counter() - start

    def save(self, step: int) -> Callable[[], dict[str, float]]:
        self._saver.save(self._state, step=step, policy_version=step, tiers=self._tier_names, meta={})

        def wait() -> dict[str, float]:
            self._saver.wait(step, DEADLINE_S)
            found = self._saver.metrics()
            # A tier that has failed is said, and missing here.
            return {tier: found[key] for tier in self._tier_names if (key := f"checkpoint/{tier}_s") in found}

        return wait

    def end(self) -> None:
        self._saver.close(60)

    def recover(self) -> dict[str, Any]:
        tiers = tiers_of(self._section, "bench", self._folder / "checkpoints", print)
        verify_and_fetch, fetched = dict[str, float](), list[Path]()
        for tier in tiers.tiers:
            only = tiers_of(self._section, "bench", self._folder / "checkpoints", print)
            only.tiers = tuple(one for one in only.tiers if one.name == tier.name)
            back = self._folder / f"back-{tier.name}"
            start = time.perf_counter()
            if only.fetch_newest(back).checkpoint is None:
                continue
            verify_and_fetch[tier.name] = time.perf_counter() - start
            fetched.append(back)
            if len(fetched) > 1:
                shutil.rmtree(fetched.pop(0))
        (back,) = fetched
        empty = {name: {key: torch.empty_like(one) for key, one in tensors.items()} for name, tensors in self._state.items()}
        into, _ = split(empty)
        start = time.perf_counter()
        loaded = read_state(back, read_rest(back), into)
        load_s = time.perf_counter() - start
        equal = all(
            torch.equal(loaded[name][key], one) for name, tensors in self._state.items() for key, one in tensors.items()
        )
        return {"reserve_s": self._reserve_s, "verify_and_fetch_s": verify_and_fetch, "load_s": load_s, "equal": equal}

    def close(self) -> None:
        self._saver.close(60)
        shutil.rmtree(memory_root(self._folder / "checkpoints"), ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)


class TorchSave(Way):
    """A plain `torch.save`, waited for."""

    name = "torch_save"
    goes_on = False

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._state, self._folder = state, folder
        folder.mkdir(parents=True)

    def save(self, step: int) -> Callable[[], dict[str, float]]:
        start = time.perf_counter()
        with (self._folder / "state.pt").open("wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        return lambda: {"disk": seconds}

    def recover(self) -> dict[str, Any]:
        start = time.perf_counter()
        torch.load(self._folder / "state.pt", weights_only=True)
        return {"load_s": time.perf_counter() - start}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def one_rank() -> None:
    """A process group of this process alone, which torch's `async_save` asks for."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class AsyncSave(Way):
    """`async_save` of torch.distributed.checkpoint without a stager, to disk."""

    name = "async_save"

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        one_rank()
        self._state, self._folder = state, folder

    def save(self, step: int) -> Callable[[], dict[str, float]]:
        import torch.distributed.checkpoint as dcp

        start = time.perf_counter()
        target = self._folder / str(step)
        future = dcp.async_save(self._state, checkpoint_id=target)

        def wait() -> dict[str, float]:
            future.result()
            seconds = time.perf_counter() - start
            shutil.rmtree(target)
            return {"disk": seconds}

        return wait

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class AmazonsLibrary(Way):
    """amzn-sagemaker-checkpointing as its README uses it, with our daemon for HyperPod's; with an endpoint, to S3 as well."""

    def __init__(self, state: dict[str, Any], folder: Path, endpoint: str | None) -> None:
        one_rank()
        self.name = "amazon_memory" if endpoint is None else "amazon_memory_and_s3"
        self._state, self._library, self._endpoint = state, import_library(), endpoint
        if endpoint is not None:
            os.environ["AWS_ENDPOINT_URL"] = endpoint
        # Its client sends a shard as one body, and our daemon is a process of its own as HyperPod's is.
        command = [sys.executable, "-m", "polyturn", "memory-tier", "serve", "--hyperpod", "--port", "0", "--capacity-gib", "8"]
        self._root = Path(f"/dev/shm/polyturn-bench-{uuid.uuid4().hex[:8]}")
        environment = {**os.environ, "POLYTURN_MEMORY_TIER_TOKEN": uuid.uuid4().hex}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._daemon = subprocess.Popen(
            [*command, "--root", str(self._root)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._daemon.stdout is not None
        self._url = self._daemon.stdout.readline().split()[2].replace("memory-tier", "http")
        self._log = folder.with_name("amazon.log")

    def save(self, step: int) -> Callable[[], dict[str, float]]:
        import logging

        import torch.distributed.checkpoint as dcp

        logger = logging.getLogger("amazon")
        logger.setLevel(logging.CRITICAL)
        made, namespace = self._library, f"bench-{step}"
        paths = None if self._endpoint is None else made.s3_paths(f"s3://{BUCKET}/amazon")
        config = made.config(namespace, 1, s3_path_strategy=paths, save_to_s3=paths is not None, logger=logger)
        access = made.access(base_url=self._url, request_timeout=DEADLINE_S, log_requests=False)
        start = time.perf_counter()
        writer = made.writer(config, step=step)
        writer.client = made.client(namespace, "0", "1", config=access, logger=logger)
        future = dcp.async_save(self._state, storage_writer=writer)

        def wait() -> dict[str, float]:
            with rank_errors():
                future.result()
            seconds = time.perf_counter() - start
            writer.client.delete_namespace()
            return {"memory": seconds} if self._endpoint is None else {"s3": seconds}

        return wait

    def close(self) -> None:
        self._daemon.terminate()
        self._daemon.wait(60)
        assert self._daemon.stdout is not None
        self._daemon.stdout.close()
        shutil.rmtree(self._root, ignore_errors=True)
        if self._endpoint is not None:
            os.environ.pop("AWS_ENDPOINT_URL", None)
