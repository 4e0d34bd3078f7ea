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

from parts.patience import PATIENCE_S
from parts.vllm_served import TOKEN, VllmServed, logprobs_of, needs_vllm, scores, tiny
from polyturn.errors import DeadlineError, EngineError, WeightMismatchError, WeightSyncError
from polyturn.processes.descendants import all_pids
from polyturn.types import SamplingParams
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.single_copy import SharedModel
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
        usual = {"verify_every": 1, "deadline_s": PATIENCE_S, "token": TOKEN, "probe": probe}
        usual |= {"on_confirmed": self.engine.confirmed} | options
        self.shared = SharedModel(model)
        self.bridge = SingleCopyServerBridge([server.url], self.shared, **usual)

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


async def test_nobody_is_answered_while_weights_change(server):
    async with Shared(server, tiny(22)) as one:
        await one.bridge.push(0)
        await one.bridge.hold(1)
        waiting = [asyncio.create_task(one.engine.generate(prompt, asking(seed=3))) for prompt in PROMPTS]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in waiting)
        step(one.model, 7)
        await one.bridge.push(1)
        for prompt, completion in zip(PROMPTS, await asyncio.gather(*waiting), strict=True):
            assert set(completion.policy_versions) == {1}
            told = torch.tensor(completion.engine_logprobs)
            assert float((scores(one.model, prompt, completion) - told).abs().max()) < EXACT


async def test_keys_and_values_of_older_weights_serve_nobody(server):
    long = tuple(range(5, 24)) * 8
    body = {"token_ids": list(long), "sampling_params": {"temperature": 1.0, "max_tokens": 8, "seed": 3, "logprobs": 0}}

    async def difference(model) -> float:
        (choice,) = (await server.ask("POST", "/inference/v1/generate", body))["choices"]
        theirs = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        return float((logprobs_of(model, long, choice["token_ids"]) - theirs).abs().max())

    async with Shared(server, tiny(23)) as one:
        await one.bridge.push(0)
        assert await difference(one.model) < EXACT
        await one.bridge.hold(1)
        step(one.model, 9)
        await one.bridge.push(1)
        assert await difference(one.model) < EXACT


async def test_a_layer_that_computes_with_another_copy_is_found(server):
    """The trainer's view is swapped for a copy, unseen: the server goes on with what it has."""
    name = "model.layers.1.mlp.up_proj.weight"
    async with Shared(server, tiny(24)) as one:
        await one.bridge.push(0)
        await one.bridge.hold(1)
        weight = one.model.get_parameter(name)
        weight.data = weight.data.clone()
        own = one.shared._own
        one.shared._own = {**own, name: weight.data}
        step(one.model, 5)
        with pytest.raises(WeightMismatchError, match=rf"after push 1 .* differs .* in 1 of 21 tensors, first {name};"):
            await one.bridge.push(1)
        assert (await server.ask("GET", "/is_paused"))["is_paused"]
        one.shared._own, weight.data = own, own[name]
        await one.bridge.push(2)
        assert await one.gap() < EXACT


async def test_the_probe_sees_it_without_checksums(server):
    async with Shared(server, tiny(25)) as one:
        await one.bridge.push(0)
        one.bridge._pushing.compare = lambda weights: asyncio.sleep(0, True)
        await one.bridge.hold(1)
        for parameter in one.model.parameters():
            parameter.data = parameter.data.clone()
        one.shared._own = {name: parameter.data for name, parameter in one.model.named_parameters()}
        with torch.no_grad():
            one.model.model.embed_tokens.weight.add_(torch.randn(one.model.model.embed_tokens.weight.shape))
        with pytest.raises(WeightMismatchError, match=r"log-probabilities that differ from the\s+trainer's by"):
            await one.bridge.push(1)


async def test_what_does_not_fit_is_refused_and_the_server_answers_on(server):
    async with Shared(server, tiny(26)) as one:
        await one.bridge.push(0)
        missing = tiny(26)
        del missing.model.norm.weight
        for model, said in (
            (missing, r"20 of the engine's 21 tensors; missing: \['model\.norm\.weight'\]"),
            (tiny(26).bfloat16(), r"bfloat16 on cpu in the trainer and torch\.float32 on cpu"),
        ):
            other = SingleCopyServerBridge([server.url], SharedModel(model), verify_every=1, deadline_s=PATIENCE_S, token=TOKEN)
            with pytest.raises(WeightSyncError, match=said):
                await other.push(1)
            await other.close()
        assert await one.gap() < EXACT


async def test_a_server_that_packs_its_weights_is_refused(vllm_server):
    bridge = SingleCopyServerBridge(
        [vllm_server.url], SharedModel(tiny(27)), verify_every=1, deadline_s=PATIENCE_S, token=TOKEN
    )
    with pytest.raises(WeightSyncError, match=r"vLLM keeps \d+ tensors in a form of its own.*: model\.layers|lm_head"):
        await bridge.push(1)
    await bridge.close()


async def test_a_trainer_that_was_lost_leaves_a_server_for_the_next_run(server):
    lost = Shared(server, tiny(28))
    await lost.engine.start()
    await lost.bridge.push(5)
    await lost.bridge.hold(6)
    async with Shared(server, tiny(29)) as second:
        await second.bridge.push(0)
        assert await second.gap() < EXACT
        with pytest.raises(WeightSyncError, match="shares its weights with another run by now"):
            await lost.bridge.hold(6)
    await lost.__aexit__()


def worker_of(server) -> list[int]:
    """The processes of the server's group that are not its API server."""
    group, found = os.getpgid(server.process.pid), []
    for pid in all_pids():
        with contextlib.suppress(ProcessLookupError):
            if pid != server.process.pid and os.getpgid(pid) == group:
                found.append(pid)
    return found


async def test_a_server_that_hangs_is_named_within_the_deadline(server):
    async with Shared(server, tiny(30), deadline_s=4.0) as one:
        await one.bridge.push(0)
        workers = worker_of(server)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError, match=rf"4 s for weight push 1 .*in pause, it waited for {server.url}"):
                await one.bridge.hold(1)
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)


async def test_a_server_that_was_killed_is_named_and_leaves_nothing(server):
    before = set(Path("/dev/shm").glob("polyturn*"))
    async with Shared(server, tiny(31)) as one:
        await one.bridge.push(0)
        os.killpg(server.process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"was killed by signal 9 .*while it served"):
            await asyncio.wait_for(server.process.ended(), 30)
        with pytest.raises(WeightSyncError, match=rf"push 1 failed in pause: {server.url}/pause\S* can't be reached"):
            await one.bridge.hold(1)
        assert set(Path("/dev/shm").glob("polyturn*")) == before
        logprobs_of(one.model, PROMPTS[0], [1, 2])  # its memory is still there
