"""vLLM in this process around a tiny random model. A start takes some seconds, and half a minute for the first of a process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from parts.patience import PATIENCE_S
from parts.vllm_served import CONTEXT, scores
from polyturn.engine.vllm import VllmEngine
from polyturn.engine.vllm_core import VllmSettings
from polyturn.errors import EngineError
from polyturn.types import Completion, SamplingParams
from polyturn.weight_sync.in_process import InProcessBridge


def vllm_here(folder: Path, model: Any, **options: Any) -> VllmEngine:
    """An engine with the weights of `model`, not started."""
    model.save_pretrained(folder)
    settings = {
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "max_num_seqs": 32,
        "gpu_memory_utilization": 0.3,
        "device": "cpu",
    }
    return VllmEngine(VllmSettings(folder=folder, **(settings | options)), start_deadline_s=240)


def copies_to(engine: VllmEngine, model: Any) -> InProcessBridge:
    return InProcessBridge(model.state_dict, engine, verify_every=1, deadline_s=PATIENCE_S)


class PushedHere:
    """An engine for the contract suite: the one of the session, to which the weights of `model` are pushed first."""

    def __init__(self, engine: VllmEngine, model: Any) -> None:
        self.engine = engine
        self.model = model
        self.started = False

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    async def start(self) -> None:
        if not self.started:
            await copies_to(self.engine, self.model).push(0)
            self.started = True

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, *, session: str | None = None
    ) -> Completion:
        if not self.started:
            raise EngineError("not started")
        return await self.engine.generate(prompt_ids, sampling, session=session)

    async def stop(self) -> None:
        self.started = False


def started(engine: VllmEngine) -> VllmEngine:
    """Start an engine for tests that have loops of their own."""
    asyncio.run(engine.start())
    return engine


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
