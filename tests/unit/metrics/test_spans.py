from __future__ import annotations

import asyncio
import threading

import pytest

from polyturn.metrics.spans import Spans


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spans_of_a_step_add_up_and_start_over():
    clock = Clock()
    spans = Spans(clock)
    for seconds in (1.0, 2.5):
        with spans.span("rollout"):
            clock.now += seconds
        clock.now += 10
    with spans.span("train"):
        clock.now += 4
    assert spans.take() == {"time/rollout_s": 3.5, "time/train_s": 4.0}
    assert spans.take() == {"time/rollout_s": 0.0, "time/train_s": 0.0}


def test_overlapping_and_nested_spans_count_once():
    clock = Clock()
    spans = Spans(clock)

    async def rollout(begin: asyncio.Event, end: asyncio.Event) -> None:
        with spans.span("rollout"):
            begin.set()
            await end.wait()

    async def main() -> None:
        begins, end = [asyncio.Event() for _ in range(3)], asyncio.Event()
        tasks = [asyncio.ensure_future(rollout(begin, end)) for begin in begins]
        for begin in begins:
            await begin.wait()
        clock.now += 5
        end.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    with spans.span("a"), spans.span("a"):
        clock.now += 1
    assert spans.take() == {"time/rollout_s": 5.0, "time/a_s": 1.0}


def test_a_span_that_raises_still_counts():
    clock = Clock()
    spans = Spans(clock)

    @spans.span("x")
    def work() -> None:
        clock.now += 2
        raise KeyError

    with pytest.raises(KeyError):
        work()
    assert spans.take() == {"time/x_s": 2.0}


def test_a_span_open_across_steps_is_shared_out():
    clock = Clock()
    spans = Spans(clock)
    with spans.span("rollout"):
        clock.now += 2
        assert spans.take() == {"time/rollout_s": 2.0}
        clock.now += 3
    assert spans.take() == {"time/rollout_s": 3.0}


def test_threads_share_one_object():
    spans = Spans()

    def work() -> None:
        for _ in range(500):
            with spans.span("x"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < spans.take()["time/x_s"] < 60
    assert spans.take() == {"time/x_s": 0.0}
