"""Episodes a second, and how late the driver's timers are, with an environment in the driver and in 1 and 2 processes.

python benchmarks/environment_processes.py --out benchmarks/results/environment_processes.json

`lookup` costs next to nothing, so it shows what the way to a process costs. `burn` spends 5 ms of CPU in each of three turns,
in pure Python that holds the GIL. Gold replies are played, 64 episodes at a time, without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from machine import describe_machine

from polyturn.environments.base import Environment, Reply, StepResult, TaskList
from polyturn.environments.builtin.lookup import Lookup
from polyturn.environments.contract import play_by_hand
from polyturn.environments.remote import RemoteEnvironment, serve_environment
from polyturn.processes.role import Role, read_address, role_environment
from polyturn.types import Message, Split, Task, TaskSource

AT_ONCE = 64
EPISODES = {"lookup": 512, "burn": 128}
TICK_S = 0.005
START_S = 60.0


class Burn(Environment):
    """Three turns of 5 ms of this thread's CPU time each."""

    name = "burn"
    turns = 3

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """As many as are played; they are all alike."""
        opening = (Message(role="user", content="go"),)
        return TaskList([Task(id=str(n), environment=self.name, messages=opening, answer="x") for n in range(EPISODES["burn"])])

    async def setup(self, task: Task) -> list[str]:
        """Nothing said yet."""
        return []

    def step(self, state: list[str], reply: Reply) -> StepResult:  # type: ignore[override]  # plain: it runs in a thread
        """Spend the time."""
        ends = time.thread_time() + 0.005
        while time.thread_time() < ends:
            sum(range(2000))
        state.append(reply.text)
        return StepResult(messages=(Message(role="tool", content="on"),), done=len(state) == self.turns)

    async def rewards(self, state: list[str]) -> dict[str, float | None]:
        """Full marks."""
        return {"answer": 1.0}

    def gold(self, task: Task) -> list[str]:
        """Anything will do."""
        return ["x"] * self.turns


def build(name: str) -> Environment:
    """An environment of this benchmark."""
    return Burn() if name == "burn" else Lookup()


async def serve(role_name: str, environment: str) -> None:
    """What a process does."""
    task = asyncio.current_task()
    assert task is not None, "run by asyncio.run"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    role = Role.from_environment(role_name)
    with role.heartbeat() as heartbeat, contextlib.suppress(asyncio.CancelledError):
        await serve_environment(role, build(environment), heartbeat, loop_limit_s=60.0)


@contextlib.contextmanager
def processes(number: int, environment: str) -> Iterator[list[str]]:
    """Addresses of `number` processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for inner in ("heartbeats", "roles"):
            (folder / inner).mkdir()
        variables = {**os.environ, **role_environment(folder, {}, "benchmark")}
        names = [f"environment-{index}" for index in range(number)]
        running = [subprocess.Popen([sys.executable, __file__, "--serve", one, environment], env=variables) for one in names]
        try:
            ends = time.monotonic() + START_S
            while None in (urls := [read_address(folder, one) for one in names]):
                assert time.monotonic() < ends, "the processes did not start"
                time.sleep(0.05)
            yield [str(url) for url in urls]
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait(60)


@contextlib.asynccontextmanager
async def played(name: str, number: int) -> AsyncIterator[Environment]:
    """The environment in the driver (`number` 0) or in that many processes, started."""
    local = build(name)
    if number == 0:
        yield local
        return
    with processes(number, name) as urls:
        environment = RemoteEnvironment(local, urls, token="benchmark")
        try:
            await environment.start()
            yield environment
        finally:
            await environment.stop()


async def once(environment: Environment, tasks: list[Task]) -> tuple[float, list[float]]:
    """Episodes a second, and how many milliseconds late each tick of a timer in the driver was."""
    slots, late = asyncio.Semaphore(AT_ONCE), list[float]()

    async def one(task: Task) -> None:
        async with slots:
            episode = await play_by_hand(environment, task, environment.gold(task))
            assert episode.done, "the gold replies end an episode"

    async def timer() -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(1000 * (time.perf_counter() - due))

    ticking = asyncio.create_task(timer())
    began = time.perf_counter()
    await asyncio.gather(*map(one, tasks))
    seconds = time.perf_counter() - began
    ticking.cancel()
    await asyncio.wait({ticking})
    return len(tasks) / seconds, late


async def measure(name: str, number: int, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    async with played(name, number) as environment:
        source = environment.tasks("train", 0)
        tasks = [source[index] for index in range(EPISODES[name])]
        await once(environment, tasks[:AT_ONCE])
        found = [await once(environment, tasks) for _ in range(repeats)]
    late = sorted(tick for _, ticks in found for tick in ticks)
    return {
        "environment": name,
        "processes": number,
        "episodes_per_s": round(statistics.median(rate for rate, _ in found), 1),
        "episodes_per_s_all": [round(rate, 1) for rate, _ in found],
        # None: nothing waited, so the event loop came to no timer before the end.
        "driver_late_ms_p95": round(late[int(0.95 * len(late))], 1) if late else None,
    }


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", nargs=2, metavar=("ROLE", "ENVIRONMENT"), help="what this program starts itself as")
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(*args.serve))
        return
    report: dict[str, Any] = {
        "benchmark": "environment_processes",
        **describe_machine(),
        "note": "other programs were running: load_before is the load average when it began",
        "load_before": round(os.getloadavg()[0], 2),
        "at_once": AT_ONCE,
        "lines": [],
    }
    print(f"{report['device']}; load average {report['load_before']}: other programs run here too", flush=True)
    for name in EPISODES:
        for number in (0, 1, 2):
            report["lines"].append(asyncio.run(measure(name, number, args.repeats)))
            print(json.dumps(report["lines"][-1]), flush=True)
    report["load_after"] = round(os.getloadavg()[0], 2)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
