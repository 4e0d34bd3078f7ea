"""vLLM in the trainer's process: one copy of the weights or two, what is refused, and what breaks."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from parts.models import VOCAB
from parts.patience import PATIENCE_S
from parts.vllm_here import EXACT, PROMPTS, asking, change, copies_to, gap
from parts.vllm_served import CONTEXT, needs_vllm, scores, tiny
from polyturn.errors import EngineError, NonFiniteError, WeightMismatchError, WeightSyncError
from polyturn.loop.engine_start import as_numbers
from polyturn.plan.engine_report import report_lines
from polyturn.weight_sync.single_copy import SingleCopyBridge

pytestmark = needs_vllm

# ── one copy ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_with_one_copy_the_optimizers_step_is_the_push(vllm_engine):
    model = tiny(21)
    parameters = dict(model.named_parameters())
    bridge = SingleCopyBridge(model, vllm_engine, deadline_s=PATIENCE_S)
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
    await SingleCopyBridge(model, vllm_engine, deadline_s=PATIENCE_S).push(1)
    ids = torch.tensor([[3, 5, 7, 9]])
    for one in (model, alone):
        one(input_ids=ids, labels=ids).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


async def test_a_model_that_got_new_tensors_is_noticed(vllm_engine):
    model = tiny(23)
    bridge = SingleCopyBridge(model, vllm_engine, deadline_s=PATIENCE_S)
    await bridge.push(1)
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data.clone()
    with pytest.raises(
        WeightMismatchError, match=r"layers\.0\.mlp\.up_proj\.weight is no view of the engine's tensor any more"
    ):
        await bridge.push(2)
    with pytest.raises(EngineError, match="a weight update to version 2 did not complete"):
        await vllm_engine.generate(PROMPTS[0], asking())
    await copies_to(vllm_engine, tiny(23)).push(3)
    assert await gap(vllm_engine, tiny(23)) < EXACT


async def test_another_type_can_not_be_shared(vllm_engine):
    with pytest.raises(WeightSyncError, match=r"bfloat16 on cpu in the trainer and torch\.float32 on cpu in the engine"):
        await SingleCopyBridge(tiny(24).bfloat16(), vllm_engine, deadline_s=PATIENCE_S).push(1)
    await copies_to(vllm_engine, tiny(24)).push(2)


async def test_other_ties_can_not_be_shared(vllm_engine):
    model = tiny(25)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(WeightSyncError, match="shares its tensor with another name on one side and not on the other"):
        await SingleCopyBridge(model, vllm_engine, deadline_s=PATIENCE_S).push(1)
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
    with pytest.raises(NonFiniteError, match="a log-probability of nan"):
        await vllm_engine.generate(PROMPTS[0], asking())
