"""Engines of vLLM in this process that a test starts itself: every architecture, starts and stops, and what breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from parts.models import tiny_model
from parts.patience import PATIENCE_S
from parts.vllm_here import EXACT, PROMPTS, asking, change, gap, started, vllm_here
from parts.vllm_served import needs_vllm, tiny
from polyturn.engine.vllm import VllmEngine
from polyturn.errors import EngineError
from polyturn.weight_sync.single_copy import SingleCopyBridge

pytestmark = needs_vllm


@pytest.fixture
def own_engine(tmp_path) -> Iterator[VllmEngine]:
    """An engine that a test may break."""
    engine = started(vllm_here(tmp_path / "model", tiny(2)))
    yield engine
    asyncio.run(engine.stop())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_architectures(tmp_path, kind):
    """Biases, norms of heads, a sliding window, layers that are fused in transformers too; heads of a size that vLLM takes."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    extra = {"head_dim": 32} if kind == "qwen3" else {}
    tie = {"tie_word_embeddings": kind == "qwen2"}
    model = tiny_model(kind, seed=3, **sizes, **extra, **tie)
    engine = started(vllm_here(tmp_path / kind, tiny_model(kind, seed=4, **sizes, **extra, **tie)))

    async def share_and_compare() -> None:
        bridge = SingleCopyBridge(model, engine, deadline_s=PATIENCE_S)
        await bridge.push(1)
        assert await gap(engine, model) < 1e-4
        change(model, 1)
        await bridge.push(2)
        assert await gap(engine, model) < 1e-4
        await engine.stop()

    asyncio.run(share_and_compare())


def test_stop_fails_whoever_waits_and_a_new_start_serves_the_folder(own_engine):
    async def stop_in_between() -> None:
        waiting = [asyncio.create_task(own_engine.generate((5, 6), asking(max_tokens=240, stop_ids=()))) for _ in range(8)]
        await asyncio.sleep(0.05)
        await own_engine.stop()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, EngineError) and "stopped" in str(error) for error in ended)
        with pytest.raises(EngineError, match="not started"):
            await own_engine.generate(PROMPTS[0], asking())
        await own_engine.start()
        assert own_engine.policy_version == 0
        assert await gap(own_engine, tiny(2)) < EXACT

    asyncio.run(stop_in_between())


async def test_an_engine_that_breaks_says_why_to_everybody(own_engine):
    thread = own_engine._thread

    def broken() -> list:
        raise RuntimeError("CUDA error: an illegal memory access")

    thread._core.step = broken
    waiting = [own_engine.generate(prompt, asking()) for prompt in PROMPTS]
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, EngineError)
        assert "the vllm engine failed" in str(error)
        assert "an illegal memory access" in str(error)
    with pytest.raises(EngineError, match="failed earlier: RuntimeError: CUDA error"):
        await own_engine.generate(PROMPTS[0], asking())


async def test_a_folder_that_vllm_can_not_load(tmp_path):
    engine = vllm_here(tmp_path / "model", tiny(2))
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="vLLM did not start: "):
        await engine.start()


def test_a_variable_that_says_the_opposite(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine = vllm_here(Path(tmp_path) / "model", tiny(2))
    with pytest.raises(
        EngineError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1 in the environment: an engine in this process needs 0"
    ):
        asyncio.run(engine.start())


async def test_a_second_one_is_refused_and_the_first_goes_on(own_engine, tmp_path):
    with pytest.raises(EngineError, match="there is a vLLM engine in this process already"):
        await vllm_here(tmp_path / "second", tiny(3)).start()
    assert await gap(own_engine, tiny(2)) < EXACT
