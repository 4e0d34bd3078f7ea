"""The barrier lets everybody go at once, in order, as soon as whoever is left waits."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.rollouts.barrier import TurnBarrier
from semantics.scenes import settled


async def test_nobody_goes_before_the_last_has_come():
    barrier, gone = TurnBarrier(["a", "b", "c"]), []

    async def go(name):
        await barrier.arrive(name)
        gone.append(name)

    first = [asyncio.create_task(go(name)) for name in ("c", "a")]
    await settled()
    assert gone == []
    await asyncio.gather(*first, go("b"))
    assert gone == ["a", "b", "c"]


async def test_who_leaves_is_not_waited_for():
    barrier = TurnBarrier(["a", "b", "c"])
    waiting = asyncio.create_task(barrier.arrive("b"))
    await settled()
    barrier.leave("a")
    await settled()
    assert not waiting.done()
    barrier.leave("c")
    barrier.leave("c")
    await asyncio.wait_for(waiting, 30)
    barrier.leave("b")


async def test_who_was_cancelled_while_waiting_leaves():
    barrier = TurnBarrier(["a", "b"])
    lost = asyncio.create_task(barrier.arrive("a"))
    await settled()
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    barrier.leave("a")
    await asyncio.wait_for(barrier.arrive("b"), 30)


async def test_cancelled_before_it_leaves_it_holds_nobody_up():
    """Both things happen between two rounds of the event loop."""
    barrier = TurnBarrier(["a", "b"])
    lost = asyncio.create_task(barrier.arrive("a"))
    await settled()
    lost.cancel()
    await asyncio.wait_for(barrier.arrive("b"), 30)
    with pytest.raises(asyncio.CancelledError):
        await lost
    barrier.leave("a")
    await asyncio.wait_for(barrier.arrive("b"), 30)


@settings(deadline=None, max_examples=50)
@given(turns=st.lists(st.integers(0, 4), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_turn_by_turn_in_order_whatever_the_delays(turns, seed):
    names = [f"{index:02}" for index in range(len(turns))]
    sent = []

    async def play(name, count, rng):
        for turn in range(count):
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            await barrier.arrive(name)
            sent.append((turn, name))
        barrier.leave(name)

    async def everybody():
        rngs = [random.Random(f"{seed}/{name}") for name in names]
        await asyncio.wait_for(asyncio.gather(*map(play, names, turns, rngs)), 30)

    barrier = TurnBarrier(names)
    asyncio.run(everybody())
    assert sent == sorted((turn, name) for name, count in zip(names, turns, strict=True) for turn in range(count))
