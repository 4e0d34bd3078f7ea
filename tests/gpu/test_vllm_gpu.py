"""vLLM in this process on a GPU: it gives memory back while the trainer works, and lies on the GPU that it was given.

One engine a process: each test starts one and stops it.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util

import pytest
import torch

from parts.models import tiny_model
from parts.vllm_here import PROMPTS, asking, vllm_here
from polyturn.engine.base import Sleep
from polyturn.engine.vllm import VllmEngine
from polyturn.errors import EngineError
from polyturn.weight_sync.in_process import InProcessBridge
from polyturn.weight_sync.single_copy import SingleCopyBridge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None or not torch.cuda.is_available(), reason="needs vLLM and a GPU"
    ),
]
SHARE = 0.2
CLOSE = 0.05
"""Of log-probabilities in bfloat16, on average; after `change` they are ten times as far off."""
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def model_of(seed: int) -> torch.nn.Module:
    return tiny_model("llama", seed=seed, initializer_range=0.05, **SIZES).to("cuda", torch.bfloat16)


def engine_of(folder, sleep: Sleep, device: str = "cuda") -> VllmEngine:
    options = {"enforce_eager": True}  # what is asked here has nothing to do with graphs
    return vllm_here(
        folder,
        model_of(1),
        dtype="bfloat16",
        device=device,
        gpu_memory_utilization=SHARE,
        sleep=sleep,
        extra=options,
    )


@torch.no_grad()
def change(model: torch.nn.Module, seed: int) -> None:
    """What an optimizer does: new values in the same tensors."""
    make = torch.Generator("cuda").manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=make, device="cuda").to(parameter.dtype) * 0.05)


async def gap(engine: VllmEngine, model: torch.nn.Module) -> float:
    """The mean difference between the engine's log-probabilities and the model's."""
    asked = [(prompt, asking(seed=seed)) for seed, prompt in enumerate(PROMPTS * 4)]
    completions = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in asked))
    return distance(model, [(prompt, c.ids, c.engine_logprobs) for (prompt, _), c in zip(asked, completions, strict=True)])


@torch.no_grad()
def distance(model: torch.nn.Module, found) -> float:
    """Of log-probabilities of ids after prompts from the model's own, on average."""
    device, gaps = next(model.parameters()).device, []
    for prompt, ids, logprobs in found:
        logits = model(input_ids=torch.tensor([[*prompt, *ids]], device=device), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
        own = torch.log_softmax(logits.float(), dim=-1).gather(-1, torch.tensor(ids, device=device)[:, None])[:, 0]
        gaps += [abs(one - other) for one, other in zip(own.tolist(), logprobs, strict=True)]
    return sum(gaps) / len(gaps)


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("sleep", ["cache", "drop_weights", "keep_weights"])
def test_memory_is_given_back_and_taken_again(tmp_path, sleep):
    async def whole() -> None:
        engine, model = engine_of(tmp_path / "model", sleep), model_of(2)
        await engine.start()
        try:
            if sleep == "cache":
                bridge = SingleCopyBridge(model, engine, deadline_s=60)
            else:
                bridge = InProcessBridge(model.state_dict, engine, verify_every=1, deadline_s=60)
            await bridge.push(1)
            total = torch.cuda.get_device_properties(0).total_memory
            for version in (2, 3, 4):
                before = free()
                await engine.sleep()
                given = free() - before
                assert given > 0.8 * SHARE * total, "nearly all of its share is keys and values"
                # The trainer's turn: it takes what was given back, and changes the weights, which are its own or shared.
                room = torch.empty(int(0.7 * SHARE * total), dtype=torch.uint8, device="cuda").fill_(7)
                older = copy.deepcopy(model)
                change(model, version)
                del room
                await bridge.push(version)
                assert await gap(engine, model) < CLOSE
                assert await gap(engine, older) > 4 * CLOSE, "the change is one that shows"
                assert free() < before + 0.1 * SHARE * total, "it has its memory again"
        finally:
            await engine.stop()

    asyncio.run(whole())


def test_weights_that_were_dropped_serve_nobody(tmp_path):
    async def whole() -> None:
        engine, model = engine_of(tmp_path / "model", "drop_weights"), model_of(3)
        await engine.start()
        try:
            bridge = InProcessBridge(model.state_dict, engine, verify_every=1, deadline_s=60)
            await bridge.push(1)
            await engine.sleep()
            with pytest.raises(EngineError, match="slept and dropped its weights"):
                await engine.generate(PROMPTS[0], asking())
            await bridge.push(2)
            assert await gap(engine, model) < CLOSE
        finally:
            await engine.stop()

    asyncio.run(whole())


def test_weights_that_waited_serve_without_a_push(tmp_path):
    async def whole() -> None:
        engine, model = engine_of(tmp_path / "model", "keep_weights"), model_of(4)
        await engine.start()
        try:
            await InProcessBridge(model.state_dict, engine, verify_every=1, deadline_s=60).push(1)
            await engine.sleep()
            assert await gap(engine, model) < CLOSE
        finally:
            await engine.stop()

    asyncio.run(whole())


def test_an_engine_that_sleeps_can_be_stopped(tmp_path):
    async def whole() -> None:
        engine = engine_of(tmp_path / "model", "keep_weights")
        before = free()
        await engine.start()
        await engine.sleep()
        await engine.stop()
        assert free() > before - (2 << 30)

    asyncio.run(whole())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_lies_on_the_gpu_that_it_was_given(tmp_path):
    from polyturn.engine.vllm_tensors import plain_tensors

    async def whole() -> None:
        engine, model = engine_of(tmp_path / "model", "off", "cuda:1"), model_of(5)
        before = free()
        await engine.start()
        try:
            assert {tensor.device for tensor in engine.named_weights().values()} == {torch.device("cuda", 1)}
            assert free() > before - (2 << 30), "nothing of it is on the trainer's"
            assert plain_tensors(engine._thread._core.model) is not None, "a push to a server would fill them in place"
            await InProcessBridge(model.state_dict, engine, verify_every=1, deadline_s=60).push(1)
            assert await gap(engine, model) < CLOSE
        finally:
            await engine.stop()

    asyncio.run(whole())
