"""Stock vLLM with Polyturn's extension around a tiny random model, as a run's role starts it. A start takes half a minute."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from parts.patience import PATIENCE_S
from polyturn.config.schema import Recipe
from polyturn.engine.http import HttpEngine
from polyturn.engine.vllm_arguments import server_arguments, server_environment
from polyturn.engine.vllm_install import find_vllm
from polyturn.engine.vllm_process import VllmProcess
from polyturn.models.tiny import build_tiny
from polyturn.processes.json_http import JsonClient
from polyturn.processes.role import TOKEN as TOKEN_VARIABLE
from polyturn.processes.starting import free_port
from polyturn.types import Completion, SamplingParams
from polyturn.weight_sync.base import WholeWeights
from polyturn.weight_sync.labels import DEFAULT_LABEL
from polyturn.weight_sync.nccl import NcclBridge

TOKEN = "a-token-for-tests"
SIZES = {"vocab_size": 24, "eos_id": 4, "pad_id": 0}
CONTEXT = 256

needs_vllm = [
    pytest.mark.real,
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, where it is in this process
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed beside Polyturn here; `make test-real` has it in an environment of its own",
    ),
]


def tiny(seed: int) -> Any:
    """A model whose next token depends on all tokens before it more than a fresh one's does."""
    made = build_tiny(seed=seed, **SIZES).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" not in name:
                weight.mul_(5 if "embed" in name else 4)
    return made


class VllmServed:
    """One server. `variables` go into its environment, `sections` into its recipe; `weights` is a model of another size."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 2,
        variables: dict[str, str] | None = None,
        weights: Any = None,
        on_gpu: bool = False,
        **sections: Any,
    ) -> None:
        self.model = folder / "model"
        (tiny(seed) if weights is None else weights).save_pretrained(self.model)
        self.recipe = Recipe.model_validate(
            {
                "model": {"path": str(self.model), **sections.pop("model", {})},
                "environment": {"id": "lookup"},
                "engine": {"kind": "vllm_server", "max_model_len": CONTEXT, "max_batch_size": 32},
                **sections,
            }
        )
        self.variables = variables or {}
        self.on_gpu = on_gpu
        port = free_port()
        self.process = VllmProcess(
            f"http://127.0.0.1:{port}",
            command=partial(server_arguments, self.recipe, port=port, on_gpu=on_gpu, vllm=find_vllm()),
            environment=self.environment,
            log=folder / "vllm.log",
            start_deadline_s=240,
        )

    @property
    def url(self) -> str:
        return self.process.url

    def environment(self, label: str) -> dict[str, str]:
        added = server_environment(self.recipe, os.environ, on_gpu=self.on_gpu, label=label)
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        return {**os.environ, **threads, **added, TOKEN_VARIABLE: TOKEN, **self.variables}

    def start(self) -> None:
        asyncio.run(self.process.start(self.model, DEFAULT_LABEL))

    async def again(self) -> None:
        """Start it anew where it was, with the weights that it began with."""
        await self.process.stop()
        await self.process.start(self.model, DEFAULT_LABEL)

    def stop(self) -> None:
        asyncio.run(self.process.stop())

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        client = JsonClient(TOKEN)
        try:
            return await client.ask(method, self.url + path, body, limit_s=PATIENCE_S)
        finally:
            await client.close()

    def client(self) -> HttpEngine:
        return HttpEngine([self.url], token=TOKEN, start_deadline_s=PATIENCE_S, request_deadline_s=PATIENCE_S)

    def bridge(self, model: Any, engine: HttpEngine | None = None, **options: Any) -> NcclBridge:
        usual: dict[str, Any] = {"verify_every": 1, "deadline_s": PATIENCE_S, "token": TOKEN, "bucket_bytes": 100_000}
        confirmed = None if engine is None else engine.confirmed
        return NcclBridge([self.url], WholeWeights(model.state_dict), on_confirmed=confirmed, **(usual | options))


class PushedVllm:
    """An engine for the contract suite: the client of a server to which the weights of `model` are pushed first."""

    def __init__(self, server: VllmServed, model: Any) -> None:
        self.server = server
        self.model = model
        self.engine = server.client()
        self.pushed = False

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    async def start(self) -> None:
        await self.engine.start()
        if not self.pushed:
            bridge = self.server.bridge(self.model, self.engine)
            await bridge.push(0)
            await bridge.close()
            self.pushed = True

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, *, session: str | None = None
    ) -> Completion:
        return await self.engine.generate(prompt_ids, sampling, session=session)

    async def stop(self) -> None:
        await self.engine.stop()


def scores(model: Any, prompt: Any, completion: Completion) -> torch.Tensor:
    """The model's own log-probabilities of a completion, from one forward pass over everything."""
    return logprobs_of(model, prompt, completion.ids)


@torch.no_grad()
def logprobs_of(model: Any, prompt: Any, ids: Any) -> torch.Tensor:
    """Those of any ids."""
    asked = torch.tensor([[*prompt, *ids]], device=next(model.parameters()).device)
    logits = model(input_ids=asked, use_cache=False).logits[0, len(prompt) - 1 : -1].cpu()
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
