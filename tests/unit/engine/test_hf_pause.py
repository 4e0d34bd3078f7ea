"""An hf engine that is paused, and updated in parts: who waits, who is answered, and what is never served."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from polyturn.engine.hf import AbortedError, HfEngine
from polyturn.errors import EngineError
from polyturn.models.tiny import build_tiny
from polyturn.types import SamplingParams

ASK = SamplingParams(max_tokens=6, seed=1)


def engine_of(seed: int = 2, **options) -> HfEngine:
    return HfEngine(build_tiny(vocab_size=20, eos_id=4, pad_id=0, seed=seed), **options)


def new_weights(seed: int = 9) -> dict[str, torch.Tensor]:
    return dict(build_tiny(vocab_size=20, eos_id=4, pad_id=0, seed=seed).state_dict())


@pytest.fixture
async def engine():
    made = engine_of(max_batch_size=2)
    await made.start()
    yield made
    await made.stop()


class Gate:
    """Holds up what the engine's thread does until it is opened."""

    def __init__(self, engine, name):
        self.entered, self.open = threading.Event(), threading.Event()
        self._method = getattr(engine, name)
        setattr(engine, name, self)

    def __call__(self, *arguments):
        self.entered.set()
        assert self.open.wait(30), "nobody opened the gate"
        return self._method(*arguments)

    async def reached(self):
        assert await asyncio.to_thread(self.entered.wait, 30)


async def rounds(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_keep_ends_after_the_running_batch_and_everybody_else_waits(engine):
    gate = Gate(engine, "_generate")
    requests = [asyncio.create_task(engine.generate((0, 7), ASK)) for _ in range(5)]
    await gate.reached()
    pause = asyncio.create_task(engine.pause("keep"))
    await rounds()
    assert not pause.done(), "a batch still runs"
    gate.open.set()
    await pause
    await rounds()
    assert [request.done() for request in requests] == [True, True, False, False, False]
    assert engine.paused
    engine.resume()
    assert len({completion.ids for completion in await asyncio.gather(*requests)}) == 1


async def test_wait_answers_whoever_is_here(engine):
    gate = Gate(engine, "_generate")
    requests = [asyncio.create_task(engine.generate((0, 7), ASK)) for _ in range(5)]
    await gate.reached()
    pause = asyncio.create_task(engine.pause("wait"))
    await rounds()
    gate.open.set()
    await pause
    assert all(request.done() for request in requests)
    late = asyncio.create_task(engine.generate((0, 7), ASK))
    await rounds()
    assert not late.done()
    await engine.pause("wait")  # a second one does not wait for what can't come
    engine.resume()
    assert (await late).ids


async def test_abort_fails_whoever_is_here_and_stops_the_work(engine):
    steps = []
    forward = engine._model.forward
    reached, go_on = threading.Event(), threading.Event()

    def counting(*arguments, **named):
        steps.append(1)
        if len(steps) == 3:
            reached.set()
            assert go_on.wait(30)
        return forward(*arguments, **named)

    engine._model.forward = counting
    long = SamplingParams(max_tokens=400, seed=1)
    requests = [asyncio.create_task(engine.generate((0, 7), long)) for _ in range(3)]
    assert await asyncio.to_thread(reached.wait, 30)
    pause = asyncio.create_task(engine.pause("abort"))
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(result, AbortedError) for result in results)
    go_on.set()
    await pause
    assert len(steps) == 3, "rows that nobody waits for are dropped at the next token"
    engine.resume()
    assert (await engine.generate((0, 7), ASK)).ids


async def test_a_row_whose_caller_left_does_not_hold_the_others_up(engine):
    steps = []
    forward = engine._model.forward
    reached, go_on = threading.Event(), threading.Event()

    def counting(*arguments, **named):
        steps.append(named["input_ids"].shape[0])
        if len(steps) == 2:
            reached.set()
            assert go_on.wait(30)
        return forward(*arguments, **named)

    engine._model.forward = counting
    left = asyncio.create_task(engine.generate((0, 7), SamplingParams(max_tokens=400, seed=1)))
    stays = asyncio.create_task(engine.generate((0, 7), ASK))
    assert await asyncio.to_thread(reached.wait, 30)
    left.cancel()
    await rounds()
    go_on.set()
    assert len((await stays).ids) == 6
    assert steps == [2, 2, 1, 1, 1, 1]
    alone = engine_of()
    await alone.start()
    assert (await alone.generate((0, 7), ASK)).ids == (await stays).ids
    await alone.stop()


async def test_an_update_in_parts_holds_requests_until_it_is_whole(engine):
    weights = new_weights()
    update = await engine.begin_update()
    waiting = asyncio.create_task(engine.generate((0, 7), ASK))
    for name, tensor in weights.items():
        engine.load(update, {name: tensor})
        await rounds(3)
    assert not waiting.done()
    assert engine.finish_update(update, 4) == 4
    completion = await waiting
    assert set(completion.policy_versions) == {4}
    fresh = engine_of(9)
    await fresh.start()
    assert (await fresh.generate((0, 7), ASK)).engine_logprobs == completion.engine_logprobs
    await fresh.stop()


async def test_an_update_that_lacks_a_tensor_is_refused_and_a_whole_one_mends_it(engine):
    weights = new_weights()
    lacking = dict(weights)
    del lacking["model.norm.weight"]
    update = await engine.begin_update()
    engine.load(update, lacking)
    with pytest.raises(EngineError, match=r"version 4 brought 20 of 21 tensors; missing: \['model.norm.weight'\]"):
        engine.finish_update(update, 4)
    with pytest.raises(EngineError, match="20 of 21"):
        await engine.generate((0, 7), ASK)
    assert engine.failure is not None
    await engine.update_weights(weights, 5)
    assert engine.failure is None
    assert set((await engine.generate((0, 7), ASK)).policy_versions) == {5}


async def test_resuming_in_the_middle_of_an_update_fails_whoever_waits(engine):
    await engine.pause("keep")
    update = await engine.begin_update()
    waiting = asyncio.create_task(engine.generate((0, 7), ASK))
    await rounds()
    engine.resume()
    with pytest.raises(EngineError, match="started and not finished"):
        await waiting
    with pytest.raises(EngineError, match="given up"):
        engine.load(update, {})
    with pytest.raises(EngineError, match="given up"):
        engine.finish_update(update, 3)


async def test_a_newer_update_takes_over_and_the_older_can_do_nothing(engine):
    weights = new_weights()
    older = await engine.begin_update()
    gate = Gate(engine, "_copy")
    copying = asyncio.create_task(
        asyncio.to_thread(engine.load, older, {"model.norm.weight": weights["model.norm.weight"] + 1})
    )
    await gate.reached()
    beginning = asyncio.create_task(engine.begin_update())
    await asyncio.sleep(0.01)
    assert not beginning.done(), "the older one still writes"
    gate.open.set()
    await copying
    newer = await beginning
    with pytest.raises(EngineError, match="given up"):
        engine.load(older, weights)
    engine.fail_update(older, "too late to matter")
    assert engine.failure is None
    engine.load(newer, weights)
    engine.finish_update(newer, 6)
    assert torch.equal(engine.named_weights()["model.norm.weight"], weights["model.norm.weight"])


async def test_an_unknown_tensor_is_named(engine):
    update = await engine.begin_update()
    with pytest.raises(EngineError, match=r"extra\.weight is no weight of this model"):
        engine.load(update, {"extra.weight": torch.zeros(1)})


async def test_a_linger_gathers_requests_that_arrive_one_by_one():
    engine = engine_of(linger_s=0.2)
    batches = []
    generate = engine._generate
    engine._generate = lambda batch, version: batches.append(len(batch)) or generate(batch, version)
    await engine.start()

    async def later(delay_s):
        await asyncio.sleep(delay_s)
        return await engine.generate((0, 7), ASK)

    await asyncio.gather(*(later(0.01 * place) for place in range(5)))
    assert batches == [5]
    await engine.stop()
