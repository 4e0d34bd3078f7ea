"""Sleep of the `vllm` engine: what vLLM is told and when, with a core that acts like vLLM's and holds no model."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from parts.patience import PATIENCE_S
from polyturn.engine import vllm_core
from polyturn.engine.vllm import VllmEngine
from polyturn.engine.vllm_core import Sampled, VllmCore, VllmSettings
from polyturn.errors import EngineError
from polyturn.processes.deadlines import deadline
from polyturn.types import SamplingParams


class Memory:
    """What vLLM 0.26 does to its memory: asleep together, awake by name, and mapping twice what is there is an error."""

    def __init__(self) -> None:
        self.there = {"weights": "first", "kv_cache": "empty"}
        self.saved: dict[str, str] = {}
        self.calls: list[str] = []

    def sleep(self, level: int) -> None:
        assert set(self.there) == {"weights", "kv_cache"}, "vLLM leaves an engine alone that sleeps already"
        self.calls.append(f"sleep {level}")
        self.saved = {"weights": self.there["weights"]} if level == 1 else {}
        self.there.clear()

    def wake_up(self, tags: list[str]) -> None:
        for tag in tags:
            assert tag not in self.there, f"{tag} would be mapped twice"
            self.calls.append(f"wake {tag}")
            self.there[tag] = self.saved.get(tag, "garbage" if tag == "weights" else "empty")


def core_of(nap: str) -> tuple[VllmCore, Memory]:
    """A core that was not built, around such memory."""
    core, memory = object.__new__(VllmCore), Memory()
    core._engine, core._nap, core._asleep, core._dropped = memory, nap, set(), False
    core._on_gpu, core._open = False, set()
    return core, memory


def test_without_sleep_nothing_is_told():
    core, memory = core_of("off")
    core.sleep()
    core.wake_weights()
    core.wake()
    assert memory.calls == []


def test_weights_that_the_trainer_computes_with_are_back_at_once():
    core, memory = core_of("cache")
    core.sleep()
    assert memory.there == {"weights": "first"}, "the same numbers, and nothing else"
    core.sleep()
    core.wake_weights()
    core.brought()
    core.wake()
    assert memory.there == {"weights": "first", "kv_cache": "empty"}
    assert memory.calls == ["sleep 1", "wake weights", "wake kv_cache"]


def test_weights_that_wait_in_cpu_memory_serve_again_without_a_push():
    core, memory = core_of("keep_weights")
    core.sleep()
    assert memory.there == {}
    core.wake()
    assert memory.there == {"weights": "first", "kv_cache": "empty"}


def test_weights_that_were_dropped_serve_nobody_before_they_were_brought():
    core, memory = core_of("drop_weights")
    core.sleep()
    with pytest.raises(EngineError, match="no push has brought new ones"):
        core.wake()
    core.wake_weights()
    assert memory.there == {"weights": "garbage"}
    with pytest.raises(EngineError, match="no push has brought new ones"):
        core.wake()
    memory.there["weights"] = "second"
    core.brought()
    core.wake()
    assert memory.there == {"weights": "second", "kv_cache": "empty"}
    core.sleep()
    assert memory.calls == ["sleep 2", "wake weights", "wake kv_cache", "sleep 2"]


class ScriptedCore(VllmCore):
    """Answers every request with one token after two steps; nobody while its gate is closed."""

    max_model_len, vocab_size = 64, 32

    def __init__(self, settings: VllmSettings) -> None:
        self.memory = Memory()
        self.gate = threading.Event()
        self.gate.set()
        self._engine, self._nap, self._asleep, self._dropped = self.memory, settings.sleep, set(), False
        self._on_gpu, self._open, self._steps = False, {}, 0

    def weights(self) -> dict[str, torch.Tensor]:
        return {}

    def report(self) -> None:
        return None

    def add(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> str:
        assert set(self.memory.there) == {"weights", "kv_cache"}, "a request came to an engine that sleeps"
        key = f"request {len(self._open) + self._steps}"
        self._open[key] = Sampled(key, [1], [-0.5], "stop")
        return key

    def step(self) -> list[Sampled]:
        assert not self._asleep
        if not self.gate.wait(0.001):
            return []  # so that whoever asks meanwhile is taken in
        self._steps += 1
        if self._steps % 2:
            return []
        found, self._open = list(self._open.values()), {}
        return found

    def forget(self) -> None:
        assert "kv_cache" in self.memory.there, "what is forgotten has to be there"
        self.memory.calls.append("forget")

    def close(self) -> None:
        self.memory.calls.append("close")


@pytest.fixture
async def engine(monkeypatch, tmp_path, request):
    monkeypatch.setattr(vllm_core, "VllmCore", ScriptedCore)
    settings = VllmSettings(
        folder=tmp_path,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        gpu_memory_utilization=0.5,
        device="cuda",
        sleep=request.param,
    )
    made = VllmEngine(settings, start_deadline_s=30)
    await made.start()
    yield made
    await made.stop()


ASKED = SamplingParams(max_tokens=1)
cache, keep, drop = (
    pytest.mark.parametrize("engine", [nap], indirect=True) for nap in ("cache", "keep_weights", "drop_weights")
)


def calls(engine: VllmEngine) -> list[str]:
    return engine._thread._core.memory.calls


@drop
async def test_a_push_wakes_an_engine_in_two_parts(engine):
    await engine.generate((1, 2), ASKED)
    await engine.sleep()
    seen = []
    await engine.change_weights(lambda own: seen.append(dict(engine._thread._core.memory.there)), 1)
    assert seen == [{"weights": "garbage"}], "the cache is not there yet while weights are brought"
    assert (await engine.generate((1, 2), ASKED)).policy_versions == (1,)
    assert calls(engine) == ["sleep 2", "wake weights", "wake kv_cache", "forget"]


@drop
async def test_without_a_push_a_request_is_refused_and_the_engine_goes_on(engine):
    await engine.sleep()
    with pytest.raises(EngineError, match="slept and dropped its weights"):
        await engine.generate((1, 2), ASKED)
    await engine.change_weights(lambda own: None, 1)
    assert (await engine.generate((1, 2), ASKED)).ids == (1,)


@drop
async def test_a_push_that_breaks_leaves_an_engine_that_answers_nobody(engine):
    await engine.sleep()

    def breaks(own) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        await engine.change_weights(breaks, 1)
    with pytest.raises(EngineError, match="a weight update to version 1 did not complete"):
        await engine.generate((1, 2), ASKED)
    await engine.change_weights(lambda own: None, 2)
    assert (await engine.generate((1, 2), ASKED)).policy_versions == (2,)


@keep
async def test_a_request_wakes_an_engine_that_kept_its_weights(engine):
    await engine.sleep()
    assert (await engine.generate((1, 2), ASKED)).policy_versions == (0,)
    assert calls(engine) == ["sleep 1", "wake weights", "wake kv_cache"]


@cache
async def test_it_sleeps_when_those_under_way_have_their_answers(engine):
    gate = engine._thread._core.gate
    gate.clear()
    asked = [asyncio.ensure_future(engine.generate((1, 2), ASKED)) for _ in range(3)]
    async with deadline(PATIENCE_S, "three requests to be under way"):
        while len(engine._thread._running) < 3:  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.001)
    sleeping = asyncio.ensure_future(engine.sleep())
    await asyncio.sleep(0)
    gate.set()
    await sleeping
    assert all(one.done() for one in asked)
    assert [(await one).ids for one in asked] == [(1,)] * 3
    await engine.sleep()
    await engine.change_weights(lambda own: None, 1)
    assert calls(engine) == ["sleep 1", "wake weights", "wake kv_cache", "forget"]
