"""What a checkpoint costs: how long training stands still, when it is durable, how long a resume takes, and the memory.

    python benchmarks/checkpoint.py --gib 0.1 1 4 [--device cuda] [--out FILE]

Side by side, on the same state, in the same run: this package (copy, then a process writes), a plain `torch.save` that is
waited for, and `async_save` of torch.distributed.checkpoint without a stager. While a save is under way the main thread goes
on computing, and how much slower it does so is measured too. A GPU's copy is held against its copy bandwidth, measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from polyturn.checkpoint.checkpointer import Checkpointer
from polyturn.checkpoint.files import read_rest, read_state
from polyturn.checkpoint.places import memory_root, tiers_of
from polyturn.checkpoint.tree import split
from polyturn.checkpoint.writing import Settings
from polyturn.config.schema import CheckpointEvery, CheckpointSection

GIB = 1 << 30
SAVES = 3
DEADLINE_S = 600.0


def make_state(gib: float, device: str) -> dict[str, Any]:
    """A model of float32 weights with the two averages of AdamW, in tensors of 16 MiB or so."""
    count = max(3, round(gib * GIB / (16 << 20)) // 3 * 3)
    size = int(gib * GIB / count / 4)
    names = ("model", "exp_avg", "exp_avg_sq")
    return {name: {str(i): torch.randn(size, device=device) for i in range(count // 3)} for name in names}


def memory_bytes(pids: list[int]) -> int:
    """Memory of processes, each page that several of them have divided among them."""
    total = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


class Peak:
    """The most memory that this process and those it started use together, and this machine's shared memory, while it is on."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Peak:
        self._start = memory_bytes(_family())
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(0.05):
            self.bytes = max(self.bytes, memory_bytes(_family()) - self._start)


def _family() -> list[int]:
    from polyturn.processes.descendants import descendants

    return [os.getpid(), *(found.pid for found in descendants())]


def busy(until: Callable[[], bool]) -> float:
    """Rounds a second of Python work that the main thread makes until it is told to stop."""
    rounds, start = 0, time.perf_counter()
    while not until():
        sum(range(20_000))
        rounds += 1
    return rounds / (time.perf_counter() - start)


def alone_rounds() -> float:
    end = time.perf_counter() + 1.0
    return busy(lambda: time.perf_counter() > end)


def measure_ours(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    section = CheckpointSection(every=CheckpointEvery(memory=1, disk=1))
    settings = Settings(run_id="bench", checkpoints=folder / "checkpoints", section=section)
    saver = Checkpointer(settings, say=print, separate=True, log=folder / "writer.log")
    blocking, memory, disk, rate = [], [], [], []
    with Peak() as peak:
        saver.start()
        start = time.perf_counter()
        saver.reserve(state)
        reserve_s = time.perf_counter() - start
        for step in range(1, SAVES + 1):
            start = time.perf_counter()
            saver.save(state, step=step, policy_version=step, tiers=["memory", "disk"], meta={})
            blocking.append(time.perf_counter() - start)
            done = threading.Event()
            waiter = threading.Thread(target=lambda: (saver.wait(step, DEADLINE_S), done.set()))  # noqa: B023 - joined below
            waiter.start()
            rate.append(busy(done.is_set))
            waiter.join()
            found = saver.metrics()
            memory.append(found["checkpoint/memory_s"])
            disk.append(found["checkpoint/disk_s"])
    saver.close(60)
    tiers = tiers_of(section, "bench", folder / "checkpoints", print)
    start = time.perf_counter()
    assert tiers.fetch_newest(folder / "back").checkpoint is not None
    fetch_s = time.perf_counter() - start
    into, _ = split({name: {key: torch.empty_like(one) for key, one in tensors.items()} for name, tensors in state.items()})
    start = time.perf_counter()
    back = read_state(folder / "back", read_rest(folder / "back"), into)
    load_s = time.perf_counter() - start
    equal = all(torch.equal(back[name][key], one) for name, tensors in state.items() for key, one in tensors.items())
    shutil.rmtree(memory_root(folder / "checkpoints"), ignore_errors=True)
    return {
        "first_blocking_s": blocking[0],
        "blocking_s": statistics.median(blocking[1:]),
        "reserve_s": reserve_s,
        "durable_in_memory_s": statistics.median(memory[1:]),
        "first_durable_in_memory_s": memory[0],
        "durable_on_disk_s": statistics.median(disk[1:]),
        "verify_and_fetch_s": fetch_s,
        "load_s": load_s,
        "equal": equal,
        "extra_memory_bytes": peak.bytes,
        "rounds_while_saving": statistics.median(rate),
    }


def measure_torch_save(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    blocking = []
    with Peak() as peak:
        for number in range(SAVES):
            start = time.perf_counter()
            with (folder / f"{number}.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            blocking.append(time.perf_counter() - start)
    start = time.perf_counter()
    torch.load(folder / "0.pt", weights_only=True)
    load_s = time.perf_counter() - start
    return {
        "first_blocking_s": blocking[0],
        "blocking_s": statistics.median(blocking[1:]),
        "durable_on_disk_s": statistics.median(blocking[1:]),
        "load_s": load_s,
        "extra_memory_bytes": peak.bytes,
    }


def measure_async_save(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    blocking, disk, rate = [], [], []
    with Peak() as peak:
        for number in range(SAVES):
            start = time.perf_counter()
            future = dcp.async_save(state, checkpoint_id=folder / f"async-{number}")
            blocking.append(time.perf_counter() - start)
            rate.append(busy(future.done))
            future.result()
            disk.append(time.perf_counter() - start)
    return {
        "first_blocking_s": blocking[0],
        "blocking_s": statistics.median(blocking[1:]),
        "durable_on_disk_s": statistics.median(disk[1:]),
        "extra_memory_bytes": peak.bytes,
        "rounds_while_saving": statistics.median(rate),
    }


def copy_bandwidth(num_bytes: int, device: str) -> float:
    """Bytes a second of a plain copy to memory that is there already (pinned, from a GPU)."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.ones(num_bytes // 4, pin_memory=device != "cpu")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return num_bytes / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one when left out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for gib in args.gib:
        state = make_state(gib, args.device)
        num_bytes = sum(one.numel() * 4 for tensors in state.values() for one in tensors.values())
        row: dict[str, Any] = {"bytes": num_bytes, "copy_bytes_per_s": copy_bandwidth(min(num_bytes, GIB), args.device)}
        row["rounds_alone"] = alone_rounds()
        for measure in (measure_ours, measure_torch_save, measure_async_save):
            folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="polyturn-bench-"))
            try:
                row[measure.__name__.removeprefix("measure_")] = measure(state, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        row["blocking_over_copy"] = row["ours"]["blocking_s"] / (num_bytes / row["copy_bytes_per_s"])
        results.append(row)
        print(json.dumps(row, indent=1), flush=True)
    whole = {
        "benchmark": "checkpoint",
        **describe_machine(),
        "results": results,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
