"""Where the seconds of a rollout go: the same prompts by vLLM's own loop, by parts of Polyturn, and by all of it, in turns.

Machines differ by a third and have moods, so a way counts against the others of its round only.

- `vllm`: vLLM's own loop, without seeds; `core`: `VllmCore` driven by one loop in its thread, as fast as it can be.
- `engine`: all requests to the engine at once, from asyncio; `rollout`: trajectories as a run makes them.
- `rollout/no collector`: with Python's garbage collector off; `rollout/500us` and so on: other turns of a thread of Python.

Of every way: median seconds, the same over the seconds of `vllm` for as many tokens, seconds inside vLLM's steps, and seconds
until the last request is in.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cases import Told
from engine_measuring import Running, prompts_of

WARM = 1
"""Rounds that are not counted."""


@dataclass(slots=True)
class Steps:
    """When vLLM stepped, and how many it had open."""

    spans: list[tuple[float, float, int]] = field(default_factory=list)

    def watched(self, step: Callable[[], Any], num_open: Callable[[], int]) -> Callable[[], Any]:
        """`step`, noted."""

        def call() -> Any:
            began, count = time.perf_counter(), num_open()
            found = step()
            self.spans.append((began, time.perf_counter(), count))
            return found

        return call

    def inside(self) -> float:
        return sum(end - begin for begin, end, _ in self.spans)

    def all_in(self, began: float) -> float:
        """Seconds until the step in which most are open."""
        return max(self.spans, key=lambda span: span[2], default=(began, began, 0))[0] - began


@contextlib.contextmanager
def watching(core: Any) -> Iterator[Steps]:
    """Note the steps of a core, its own and those of vLLM's loop, while this is open."""
    steps, engine = Steps(), core._engine
    kept = type(core).step
    type(core).step = lambda self: steps.watched(lambda: kept(self), lambda: len(self._open))()
    engine.step = steps.watched(engine.step, engine.get_num_unfinished_requests)
    try:
        yield steps
    finally:
        type(core).step = kept
        del engine.step


@contextlib.contextmanager
def turns_of(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def through_core(running: Running, number: int) -> tuple[int, float]:
    """The core's own loop, in its thread."""
    from polyturn.types import SamplingParams

    prompts, core = prompts_of(running.checked, running.policy.renderer, number), running.core
    most, stop_ids = running.sizes.most_tokens, running.policy.renderer.stop_ids
    done: asyncio.Future[tuple[int, float]] = asyncio.get_running_loop().create_future()

    def run() -> None:
        began, tokens = time.perf_counter(), 0
        for seed, ids in enumerate(prompts):
            core.add(ids, SamplingParams(max_tokens=most, seed=seed, stop_ids=stop_ids))
        while core.busy:
            tokens += sum(len(sampled.ids) for sampled in core.step())
        done.get_loop().call_soon_threadsafe(done.set_result, (tokens, time.perf_counter() - began))

    running.engine._thread.post(run)
    return await done


async def through_engine(running: Running, number: int) -> tuple[int, float]:
    """All requests at once, to their natural ends."""
    from polyturn.types import SamplingParams

    prompts = prompts_of(running.checked, running.policy.renderer, number)
    most, stop_ids = running.sizes.most_tokens, running.policy.renderer.stop_ids
    began = time.perf_counter()
    asked = [SamplingParams(max_tokens=most, seed=seed, stop_ids=stop_ids) for seed in range(len(prompts))]
    answers = await asyncio.gather(*map(running.engine.generate, prompts, asked))
    return sum(len(answer.ids) for answer in answers), time.perf_counter() - began


def ways_of(running: Running) -> dict[str, Callable[[int], Awaitable[tuple[int, float]]]]:
    """Each takes the number of a round's prompts, and gives tokens and seconds."""

    def within(around: Callable[[], contextlib.AbstractContextManager[None]]) -> Callable[[int], Awaitable[tuple[int, float]]]:
        async def call(number: int) -> tuple[int, float]:
            with around():
                return await running.roll_out(number)

        return call

    async def by_vllm(number: int) -> tuple[int, float]:
        prompts = prompts_of(running.checked, running.policy.renderer, number)
        return await running.raw(prompts, running.policy.renderer.stop_ids, running.sizes.most_tokens)

    return {
        "vllm": by_vllm,
        "core": lambda number: through_core(running, number),
        "engine": lambda number: through_engine(running, number),
        "rollout": running.roll_out,
        "rollout/no collector": within(no_collector),
        "rollout/500us": within(lambda: turns_of(5e-4)),
        "rollout/5us": within(lambda: turns_of(5e-6)),
    }


async def in_turns(running: Running, told: Told) -> None:
    """All ways, round after round, until the case is ended; what is known is told after each round."""
    await running.push()
    ways = ways_of(running)
    found: dict[str, list[tuple[int, float, float, float]]] = {name: [] for name in ways}
    for number in range(WARM + running.sizes.turns):
        for name, way in ways.items():
            with watching(running.core) as steps:
                began = time.perf_counter()
                tokens, seconds = await way(number)
            running.core.forget()
            if number >= WARM:
                found[name].append((tokens, seconds, steps.inside(), steps.all_in(began)))
        if number >= WARM:
            told(turns=number + 1 - WARM, ways=summary(found))


def summary(found: dict[str, list[tuple[int, float, float, float]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by way."""

    def of_vllm(name: str) -> float:
        pairs = zip(found[name], found["vllm"], strict=True)
        return statistics.median((seconds / tokens) / (base_s / base) for (tokens, seconds, *_), (base, base_s, *_) in pairs)

    return {
        name: {
            "tokens": statistics.median(one[0] for one in rounds),
            "seconds": round(statistics.median(one[1] for one in rounds), 4),
            "of_vllm": round(of_vllm(name), 4),
            "in_steps_s": round(statistics.median(one[2] for one in rounds), 4),
            "all_in_s": round(statistics.median(one[3] for one in rounds), 4),
        }
        for name, rounds in found.items()
    }
