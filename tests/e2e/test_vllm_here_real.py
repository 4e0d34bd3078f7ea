"""vLLM in the trainer's process: one copy of the weights or two, what is refused, and what breaks."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parts.models import VOCAB, tiny_model
from parts.vllm_here import copies_to, started, vllm_here
from parts.vllm_served import CONTEXT, needs_vllm, scores, tiny
from polyturn.engine.vllm import VllmEngine
from polyturn.errors import EngineError, NonFiniteError, WeightSyncError
from polyturn.loop.engine_start import as_numbers
from polyturn.plan.engine_report import report_lines
from polyturn.types import SamplingParams
from polyturn.weight_sync.single_copy import SingleCopyBridge

pytestmark = needs_vllm

PROMPTS = [(0, 7, 9), (0, 5), (3, 3, 8, 11, 20, 6, 1), (1, 2)]
EXACT = 2e-5
"""Of log-probabilities in float32."""


def asking(**options) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "seed": 1, "stop_ids": (4,)} | options))


async def gap(engine: VllmEngine, model) -> float:
    """The largest difference between the engine's log-probabilities and the model's."""
    asked = [(prompt, asking(seed=seed)) for seed, prompt in enumerate(PROMPTS * 3)]
    completions = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in asked))
    pairs = zip(asked, completions, strict=True)
    return max(float((scores(model, prompt, c) - torch.tensor(c.engine_logprobs)).abs().max()) for (prompt, _), c in pairs)


def change(model, seed: int) -> None:
    """What an optimizer does: new values in the same tensors."""
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=make) * 0.05)


@pytest.fixture
def own_engine(tmp_path) -> Iterator[VllmEngine]:
    """An engine that a test may break."""
    engine = started(vllm_here(tmp_path / "model", tiny(2)))
    yield engine
    asyncio.run(engine.stop())


# ── one copy ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_with_one_copy_the_optimizers_step_is_the_push(vllm_engine):
    model = tiny(21)
    parameters = dict(model.named_parameters())
    bridge = SingleCopyBridge(model, vllm_engine, deadline_s=60)
    await bridge.push(1)
    own = vllm_engine.named_weights()
    assert {name: p.data_ptr() for name, p in parameters.items()} == {name: own[name].data_ptr() for name in parameters}
    assert await gap(vllm_engine, model) < EXACT
    for version in (2, 3):
        before = copy.deepcopy(model)
        change(model, version)
        await bridge.push(version)
        assert vllm_engine.policy_version == version
        assert await gap(vllm_engine, model) < EXACT
        assert await gap(vllm_engine, before) > 0.01, "the change is one that shows"
    completion = await vllm_engine.generate(PROMPTS[0], asking())
    assert set(completion.policy_versions) == {3}


async def test_gradients_go_through_shared_weights(vllm_engine):
    model, alone = tiny(22), tiny(22)
    await SingleCopyBridge(model, vllm_engine, deadline_s=60).push(1)
    ids = torch.tensor([[3, 5, 7, 9]])
    for one in (model, alone):
        one(input_ids=ids, labels=ids).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


async def test_a_model_that_got_new_tensors_is_noticed(vllm_engine):
    model = tiny(23)
    bridge = SingleCopyBridge(model, vllm_engine, deadline_s=60)
    await bridge.push(1)
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data.clone()
    with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.up_proj\.weight is no view of the engine's tensor any more"):
        await bridge.push(2)
    with pytest.raises(EngineError, match="a weight update to version 2 did not complete"):
        await vllm_engine.generate(PROMPTS[0], asking())
    await copies_to(vllm_engine, tiny(23)).push(3)
    assert await gap(vllm_engine, tiny(23)) < EXACT


async def test_another_type_can_not_be_shared(vllm_engine):
    with pytest.raises(WeightSyncError, match=r"bfloat16 on cpu in the trainer and torch\.float32 on cpu in the engine"):
        await SingleCopyBridge(tiny(24).bfloat16(), vllm_engine, deadline_s=60).push(1)
    await copies_to(vllm_engine, tiny(24)).push(2)


async def test_other_ties_can_not_be_shared(vllm_engine):
    model = tiny(25)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(WeightSyncError, match="shares its tensor with another name on one side and not on the other"):
        await SingleCopyBridge(model, vllm_engine, deadline_s=60).push(1)
    await copies_to(vllm_engine, tiny(25)).push(2)


# ── two copies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_with_two_copies_a_push_brings_all_of_them(vllm_engine):
    model = tiny(31)
    bridge = copies_to(vllm_engine, model)
    await bridge.push(1)
    assert await gap(vllm_engine, model) < EXACT
    pushed = copy.deepcopy(model)
    change(model, 5)
    assert await gap(vllm_engine, pushed) < EXACT, "the engine's are its own"
    await bridge.push(2)
    assert await gap(vllm_engine, model) < EXACT


@pytest.mark.parametrize("missing", list(tiny(1).state_dict()))
async def test_every_parameter_is_covered(vllm_engine, missing):
    weights = {name: tensor for name, tensor in tiny(1).state_dict().items() if name != missing}

    class Lacking(torch.nn.Module):
        def state_dict(self, *_, **__):
            return weights

    with pytest.raises(WeightSyncError, match=rf"missing: \['{missing}'\]"):
        await copies_to(vllm_engine, Lacking()).push(1)


async def test_keys_and_values_of_older_weights_serve_nobody(vllm_engine):
    """A prompt of several blocks that was just computed would be taken from the prefix cache."""
    model, prompt = tiny(32), tuple(range(5, 23)) * 6
    bridge = copies_to(vllm_engine, model)
    await bridge.push(1)
    await vllm_engine.generate(prompt, asking())
    change(model, 7)
    await bridge.push(2)
    completion = await vllm_engine.generate(prompt, asking())
    assert float((scores(model, prompt, completion) - torch.tensor(completion.engine_logprobs)).abs().max()) < EXACT


async def test_requests_under_way_are_finished_with_the_weights_they_began_with(vllm_engine):
    old, new = tiny(33), tiny(34)
    await copies_to(vllm_engine, old).push(1)
    sampling = asking(max_tokens=60, stop_ids=())
    running = [asyncio.create_task(vllm_engine.generate(prompt, sampling)) for prompt in PROMPTS]
    await asyncio.sleep(0.05)
    push = asyncio.create_task(copies_to(vllm_engine, new).push(2))
    await asyncio.sleep(0)
    late = await vllm_engine.generate(PROMPTS[0], sampling)
    await push
    for prompt, completion in zip(PROMPTS, await asyncio.gather(*running), strict=True):
        assert set(completion.policy_versions) == {1}
        assert float((scores(old, prompt, completion) - torch.tensor(completion.engine_logprobs)).abs().max()) < EXACT
    assert set(late.policy_versions) == {2}
    assert float((scores(new, PROMPTS[0], late) - torch.tensor(late.engine_logprobs)).abs().max()) < EXACT


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_architectures(tmp_path, kind):
    """Biases, norms of heads, a sliding window, layers that are fused in transformers too; heads of a size that vLLM takes."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    extra = {"head_dim": 32} if kind == "qwen3" else {}
    tie = {"tie_word_embeddings": kind == "qwen2"}
    model = tiny_model(kind, seed=3, **sizes, **extra, **tie)
    engine = started(vllm_here(tmp_path / kind, tiny_model(kind, seed=4, **sizes, **extra, **tie)))

    async def share_and_compare() -> None:
        bridge = SingleCopyBridge(model, engine, deadline_s=60)
        await bridge.push(1)
        assert await gap(engine, model) < 1e-4
        change(model, 1)
        await bridge.push(2)
        assert await gap(engine, model) < 1e-4
        await engine.stop()

    asyncio.run(share_and_compare())


def test_it_says_how_much_it_keeps(vllm_engine):
    report = vllm_engine.report
    assert report.kv_bytes == pytest.approx(2**30, rel=0.01), "the usual pool on a CPU"
    assert report.blocks * 16 <= report.tokens
    assert any("KV cache" in line and "1.00" in line for line in report_lines(report, None))
    numbers = as_numbers(report)
    assert numbers["tokens"] == report.tokens
    assert "weights_bytes" not in numbers, "vLLM does not say it on a CPU"


# ── what breaks ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_requests_that_can_not_be_served(vllm_engine):
    with pytest.raises(EngineError, match=rf"a prompt of {CONTEXT} ids leaves no room in vLLM's context of {CONTEXT}"):
        await vllm_engine.generate((5,) * CONTEXT, asking())
    for wrong in (-1, 24, VOCAB * 1000):
        with pytest.raises(EngineError, match=f"a prompt has the id {wrong}, and the vocabulary ends at 23"):
            await vllm_engine.generate((0, wrong), asking())
    cut = await vllm_engine.generate((5,) * (CONTEXT - 3), asking(stop_ids=(), max_tokens=50))
    assert (len(cut.ids), cut.stop_reason) == (3, "length")
    assert (await vllm_engine.generate(PROMPTS[0], asking())).ids


async def test_a_caller_that_gives_up_frees_its_place(vllm_engine):
    endless = [asyncio.create_task(vllm_engine.generate((5, 6), asking(max_tokens=240, stop_ids=()))) for _ in range(40)]
    await asyncio.sleep(0.05)
    for task in endless:
        task.cancel()
    await asyncio.gather(*endless, return_exceptions=True)
    assert (await vllm_engine.generate(PROMPTS[0], asking())).ids
    thread = vllm_engine._thread
    assert not thread._running
    assert not thread._waiting


async def test_weights_that_are_not_finite_end_the_run_and_not_the_engine(vllm_engine):
    model = tiny(41)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    await copies_to(vllm_engine, model).push(1)
    with pytest.raises((NonFiniteError, EngineError)):
        await vllm_engine.generate(PROMPTS[0], asking())


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
