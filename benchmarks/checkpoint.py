"""What a checkpoint costs: how long training stands still, when it is durable, how long a resume takes, and the memory.

    python benchmarks/checkpoint.py --gib 0.1 1 4 --s3-endpoint http://127.0.0.1:8333 [--amazon] --out FILE
    python benchmarks/checkpoint.py --parameters 1.5e9 --device cuda --out FILE

Side by side, on one state, in turns: a plain copy of the same bytes to memory that is there (pinned, from a GPU), this package
(copy, then a process writes), `torch.save` that is waited for, `async_save` of torch without a stager, and Amazon's library.
Every save is held against the plain copy just before it: what others do on the machine is then in both. While a save is under
way the main thread goes on computing, and how much slower it does so is measured too.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoint_ways import AmazonsLibrary, AsyncSave, Ours, TorchSave, Way, tensors_of
from machine import PACKAGES, describe_machine

from polyturn.checkpoint.arena import Arena

GIB = 1 << 30
MOST_COPY_BYTES = GIB
"""Memory that the plain copy goes to; a larger state is copied there piece by piece."""
MOST_IN_MEMORY_TIER = 2 * GIB
"""States above are saved to disk and S3 only: the memory tier holds two of them for a moment."""


def make_state(gib: float, device: str) -> dict[str, Any]:
    """A model of float32 weights with the two averages of AdamW, in tensors of 16 MiB or so."""
    count = max(3, round(gib * GIB / (16 << 20)) // 3 * 3)
    size = int(gib * GIB / count / 4)
    names = ("model", "exp_avg", "exp_avg_sq")
    return {name: {str(i): torch.randn(size, device=device) for i in range(count // 3)} for name in names}


def make_training_state(parameters: float, device: str) -> dict[str, Any]:
    """Bfloat16 weights, float32 masters and the two averages: 14 bytes a parameter, in tensors of 4 Mi parameters."""
    count = max(1, round(parameters / (4 << 20)))
    kinds = {"model": torch.bfloat16, "masters": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    return {
        name: {str(i): torch.randn(4 << 20, device=device).to(dtype) for i in range(count)} for name, dtype in kinds.items()
    }


class PlainCopy:
    """Copies all tensors to memory that is there already, and says how long it took."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._tensors = tensors_of(state)
        on_gpu = self._tensors[0].is_cuda
        size = min(MOST_COPY_BYTES, sum(one.numel() * one.element_size() for one in self._tensors))
        self._target = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._on_gpu = on_gpu

    def __call__(self) -> float:
        at, start = 0, time.perf_counter()
        for one in self._tensors:
            num_bytes = one.numel() * one.element_size()
            at = 0 if at + num_bytes > self._target.numel() else at
            self._target[at : at + num_bytes].view(one.dtype).copy_(one.view(-1), non_blocking=self._on_gpu)
            at += num_bytes
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def memory_bytes(pids: Sequence[int]) -> int:
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


def _used() -> int:
    from polyturn.processes.descendants import descendants

    own = memory_bytes([os.getpid(), *(found.pid for found in descendants())])
    files = os.statvfs("/dev/shm")
    return own + (files.f_blocks - files.f_bfree) * files.f_frsize


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most memory that this process, those it started and shared memory take on top, while it is on."""
    found, stopped, start = [0], threading.Event(), _used()

    def watch() -> None:
        while not stopped.wait(0.1):
            found[0] = max(found[0], _used() - start)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        stopped.set()
        watcher.join()


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


@dataclass
class Measured:
    """Of one way, over its saves."""

    blocking: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    durable: dict[str, list[float]] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    extra_memory_bytes: int = 0

    def save(self, way: Way, step: int, plain: PlainCopy) -> None:
        """One save, with the plain copy before it."""
        self.copies.append(plain())
        start = time.perf_counter()
        pending = way.save(step)
        self.blocking.append(time.perf_counter() - start)
        done, found = threading.Event(), dict[str, float]()

        def wait() -> None:
            try:
                found.update(pending())
            finally:
                done.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        rate = busy(done.is_set)
        waiter.join()
        if len(found) == 0:
            raise SystemExit(f"{way.name}: the save of step {step} failed")
        if way.goes_on:
            self.rates.append(rate)
        for tier, seconds in found.items():
            self.durable.setdefault(tier, []).append(seconds)
        print(f"{way.name} {step}: copy {self.copies[-1]:.3f}, blocking {self.blocking[-1]:.3f}, durable {found}", flush=True)

    def result(self) -> dict[str, Any]:
        """The first save, and medians of the others."""
        over = [blocked / copied for blocked, copied in zip(self.blocking[1:], self.copies[1:], strict=True)]
        found = {
            "first_blocking_s": self.blocking[0],
            "first_blocking_over_copy": self.blocking[0] / self.copies[0],
            "blocking_s": statistics.median(self.blocking[1:]),
            "copy_s": statistics.median(self.copies[1:]),
            "blocking_over_copy": statistics.median(over),
            "blocking_over_copy_all": over,
            "durable_s": {tier: statistics.median(seconds[1:] or seconds) for tier, seconds in self.durable.items()},
            "durable_times": {tier: len(seconds) for tier, seconds in self.durable.items()},
            "extra_memory_bytes": self.extra_memory_bytes,
        }
        return {**found, "rounds_while_saving": statistics.median(self.rates)} if self.rates else found


def in_turns(ways: Sequence[Callable[[], Way]], plain: PlainCopy, saves: int) -> dict[str, Any]:
    """Each way once by itself, then all in turns, then what it takes to come back."""
    found: dict[str, Measured] = {}
    made: list[Way] = []
    result: dict[str, Any] = {}
    try:
        for make in ways:
            with peak() as most:
                way = make()
                made.append(way)
                found[way.name] = Measured()
                found[way.name].save(way, 1, plain)
            found[way.name].extra_memory_bytes = most[0]
        for step in range(2, saves + 2):
            for way in made:
                found[way.name].save(way, step, plain)
        for way in made:
            way.end()
            result[way.name] = {**found[way.name].result(), **way.recover()}
            print(f"{way.name}: {json.dumps(result[way.name])}", flush=True)
    finally:
        for way in made:
            way.close()
    return result


def hidden(state: dict[str, Any], device: str, step_s: float) -> dict[str, float]:
    """How much longer products of matrices take, which stand for generation, when the copy goes on beside them."""
    arena, tensors = Arena(), {str(number): one for number, one in enumerate(tensors_of(state))}
    size = 4096 if device != "cpu" else 512
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device != "cpu" else torch.float32)

    def work(rounds: int) -> float:
        start, found = time.perf_counter(), left
        for _ in range(rounds):
            found = torch.tanh(found @ left)
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    try:
        arena.stage(tensors)
        work(20)  # the first products on a GPU are no measure
        rounds = max(1, int(20 * 3.0 / max(work(20), 1e-6)))  # some 3 s
        alone, beside, copies = [], [], []
        for _ in range(3):
            alone.append(work(rounds))
            thread = threading.Thread(target=lambda: copies.append(_seconds(lambda: arena.stage(tensors))))
            thread.start()
            beside.append(work(rounds))
            thread.join()
    finally:
        arena.close()
    lost = max(0.0, statistics.median(beside) - statistics.median(alone))
    return {
        "alone_s": statistics.median(alone),
        "beside_a_copy_s": statistics.median(beside),
        "copy_s": statistics.median(copies),
        "lost_s": lost,
        "step_s": step_s,
        "lost_share_of_a_step": lost / step_s,
    }


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(state: dict[str, Any], args: argparse.Namespace, told: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All ways on one state; what is known is `told` whenever it is more."""
    num_bytes = sum(one.numel() * one.element_size() for one in tensors_of(state))
    plain = PlainCopy(state)
    plain()
    row: dict[str, Any] = {"bytes": num_bytes, "saves": args.saves, "rounds_alone": alone_rounds()}
    in_memory = num_bytes <= MOST_IN_MEMORY_TIER or args.device != "cpu"
    tiers = [*(["memory"] if in_memory else []), "disk", *(["s3"] if args.s3_endpoint else [])]
    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="polyturn-bench-"))
    row["hidden"] = hidden(state, args.device, args.step_s)
    told(row)
    try:
        ways: list[Callable[[], Way]] = [
            lambda: Ours(state, folder / "ours", tiers, args.s3_endpoint),
            lambda: TorchSave(state, folder / "torch"),
        ]
        row |= in_turns(ways, plain, args.saves)
        told(row)
        row |= in_turns([lambda: AsyncSave(state, folder / "async")], plain, args.saves)
        if args.amazon and in_memory:
            for endpoint in (None, *([args.s3_endpoint] if args.s3_endpoint else [])):
                row |= in_turns([lambda: AmazonsLibrary(state, folder / "daemon", endpoint)], plain, args.saves)  # noqa: B023
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="*", default=[], help="states of float32 weights and two averages")
    parser.add_argument("--parameters", type=float, help="the state of a model trained in bfloat16 with AdamW, such as 1.5e9")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--saves", type=int, default=3, help="after the first, in turns (default 3)")
    parser.add_argument("--step-s", type=float, default=20.0, help="a step of training, for the share that is lost of it")
    parser.add_argument("--s3-endpoint", help="of a server that speaks S3's protocol, with a bucket `bench`")
    parser.add_argument("--amazon", action="store_true", help="also amzn-sagemaker-checkpointing, which must be installed")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one when left out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    makers: list[Callable[[], dict[str, Any]]] = [lambda gib=gib: make_state(gib, args.device) for gib in args.gib]
    if args.parameters:
        makers.append(lambda: make_training_state(args.parameters, args.device))
    results: list[dict[str, Any]] = []
    packages = [*PACKAGES, *(["amzn-sagemaker-checkpointing", "s3torchconnector"] if args.amazon else [])]

    def told(row: dict[str, Any]) -> None:
        """Written whenever more is known, so that a run that is cut leaves what it has."""
        if args.out is not None:
            whole = {"benchmark": "checkpoint", **describe_machine(packages), "results": [*results, row]}
            args.out.write_text(json.dumps(whole, indent=1) + "\n")

    for make in makers:
        row = measure(make(), args, told)
        told(row)
        results.append(row)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
