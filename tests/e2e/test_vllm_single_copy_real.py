"""One copy of the weights for a trainer and a vLLM server beside it, on a CPU: shared memory stands for CUDA IPC.

All tests share the server; those that end it come last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch

from parts.vllm_served import TOKEN, VllmServed, logprobs_of, needs_vllm, scores, tiny
from polyturn.errors import DeadlineError, EngineError, WeightMismatchError, WeightSyncError
from polyturn.processes.descendants import all_pids
from polyturn.types import SamplingParams
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.single_copy_server import SingleCopyServerBridge

pytestmark = needs_vllm

PROMPTS = [(0, 7, 9), (0, 5), (3, 3, 8, 11, 20, 6, 1), (1, 2)]
EXACT = 2e-5
SINGLE_COPY = {"weight_sync": {"mode": "single_copy"}}


def asking(**options) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "seed": 1, "stop_ids": (4,)} | options))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = VllmServed(tmp_path_factory.mktemp("single-copy"), **SINGLE_COPY)
    made.start()
    yield made
    made.stop()


class Shared:
    """A trainer's model, and client and bridge of its run."""

    def __init__(self, server, model, **options):
        self.model = model
        self.server = server
        self.engine = server.client()
        probe = Probe(score=lambda prompt, ids: logprobs_of(model, prompt, ids).tolist(), limit=0.3, vocab_size=24)
        usual = {"verify_every": 1, "deadline_s": 60.0, "token": TOKEN, "probe": probe}
        usual |= {"on_confirmed": self.engine.confirmed} | options
        self.bridge = SingleCopyServerBridge(server.url, model, **usual)

    async def __aenter__(self):
        await self.engine.start()
        return self

    async def __aexit__(self, *_):
        await self.bridge.close()
        await self.engine.stop()

    async def gap(self, model=None) -> float:
        """The largest difference between the server's log-probabilities and those of a model, the trainer's."""
        asked = [(prompt, asking(seed=seed)) for seed, prompt in enumerate(PROMPTS * 3)]
        answers = await asyncio.gather(*(self.engine.generate(prompt, sampling) for prompt, sampling in asked))
        pairs = zip(asked, answers, strict=True)
        model = model or self.model
        return max(float((scores(model, p, a) - torch.tensor(a.engine_logprobs)).abs().max()) for (p, _), a in pairs)


def step(model, seed):
    """What an optimizer does: new values in the same tensors."""
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=make) * 0.05)


def frozen_copy(model):
    other = tiny(1)
    other.load_state_dict(model.state_dict())
    return other


async def test_the_optimizers_step_is_the_push(server):
    async with Shared(server, tiny(21)) as one:
        places = {name: parameter.data_ptr() for name, parameter in one.model.named_parameters()}
        await one.bridge.hold(1)
        await one.bridge.push(1)
        assert all(parameter.data_ptr() != places[name] for name, parameter in one.model.named_parameters())
        assert one.model.lm_head.weight.data_ptr() == one.model.model.embed_tokens.weight.data_ptr()
        assert await one.gap() < EXACT
        for version in (2, 3):
            before = frozen_copy(one.model)
            await one.bridge.hold(version)
            step(one.model, version)
            await one.bridge.push(version)
            assert one.engine.policy_version == version
            assert await one.gap() < EXACT
            assert await one.gap(before) > 0.01, "the change is one that shows"
        greedy = await one.engine.generate(PROMPTS[0], asking(temperature=0.0))
        assert set(greedy.policy_versions) == {3}
        logits = one.model(input_ids=torch.tensor([[*PROMPTS[0], *greedy.ids]])).logits[0, len(PROMPTS[0]) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(greedy.ids)
