"""Adapters for real vLLM: loaded by a name of their own, proved, asked for by it, and unloaded; and files that are broken."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch

from parts.patience import PATIENCE_S
from parts.vllm_served import TOKEN, VllmServed, logprobs_of, needs_vllm, scores, tiny
from polyturn.errors import EngineError, WeightMismatchError, WeightSyncError
from polyturn.models.adapters import adapter_parameters, add_adapters, frozen_weights, pushed_weights, save_adapters
from polyturn.types import SamplingParams
from polyturn.weight_sync.lora import LoraBridge
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.servers import WeightServer

pytestmark = needs_vllm

PROMPTS = [(0, 7, 9), (0, 5), (3, 3, 8, 11, 20, 6, 1), (1, 2)]
RANK, ALPHA = 4, 12.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = VllmServed(tmp_path_factory.mktemp("lora"), model={"lora": {"rank": RANK, "alpha": ALPHA}})
    made.start()
    yield made
    made.stop()


def adapted(seed=2):
    model = tiny(seed)
    add_adapters(model, rank=RANK, alpha=ALPHA, targets=None, base="tiny", seed=1)
    return model


def change(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model):
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.fixture
async def trained(server, tmp_path):
    model, engine = adapted(), server.client()
    await engine.start()
    bridge = bridge_of(model, server, tmp_path, engine)
    yield model, engine, bridge
    await bridge.close()
    await engine.stop()


def bridge_of(model, server, folder, engine=None, save=None, **options):
    return LoraBridge(
        [server.url],
        partial(pushed_weights, model),
        partial(frozen_weights, model),
        save or partial(save_adapters, model),
        folder / "adapters",
        scaling=ALPHA / RANK,
        token=TOKEN,
        on_confirmed=None if engine is None else engine.confirmed,
        **{"verify_every": 1, "deadline_s": PATIENCE_S} | options,
    )


async def gap(model, engine) -> float:
    asked = [(prompt, SamplingParams(max_tokens=12, seed=seed)) for seed, prompt in enumerate(PROMPTS * 3)]
    completions = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in asked))
    pairs = zip(asked, completions, strict=True)
    return max(float((scores(model, p, c) - torch.tensor(c.engine_logprobs)).abs().max()) for (p, _), c in pairs)


async def loaded(server) -> set[str]:
    return {model["id"] for model in (await server.ask("GET", "/v1/models"))["data"]} - {"policy"}


async def test_each_push_is_served_by_a_name_of_its_own(trained, server, tmp_path):
    model, engine, bridge = trained
    for version in range(4):
        change(model, version)
        await bridge.push(version)
        assert engine.policy_version == version
        assert await gap(model, engine) < 5e-5
        completion = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=4, seed=1))
        assert set(completion.policy_versions) == {version}
        names = await loaded(server)
        assert len(names) == min(2, version + 1), "older ones are unloaded"
        assert {path.name for path in (tmp_path / "adapters").iterdir()} == names
    await bridge.close()
    assert await loaded(server) == set()
    assert not (tmp_path / "adapters").exists()


async def test_adapters_that_are_not_the_trainers_are_found(trained, server, tmp_path):
    model, engine, bridge = trained
    await bridge.push(0)
    change(model, 5)
    other = adapted()
    change(other, 6)
    wrong = bridge_of(model, server, tmp_path / "wrong", engine, save=partial(save_adapters, other))
    with pytest.raises(
        WeightMismatchError, match=r"after push 1 .*differs from the trainer in \d+ of 28 tensors, first model\.layers"
    ):
        await wrong.push(1)
    assert engine.policy_version == 0, "requests still ask for the last good ones"
    await wrong.close()


async def test_a_truncated_file_is_refused_and_the_old_adapters_serve_on(trained, server, tmp_path):
    model, engine, bridge = trained
    change(model, 1)
    await bridge.push(0)

    def save_half(folder):
        save_adapters(model, folder)
        file = folder / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])

    broken = bridge_of(model, server, tmp_path / "broken", engine, save=save_half)
    with pytest.raises(WeightSyncError, match=r"push 1 failed in load: .*/v1/load_lora_adapter answered \d+: "):
        await broken.push(1)
    await broken.close()
    assert await gap(model, engine) < 5e-5
    assert engine.policy_version == 0


async def test_another_base_is_refused_before_anything_is_loaded(server, tmp_path):
    bridge = bridge_of(adapted(seed=3), server, tmp_path)
    with pytest.raises(WeightMismatchError, match=r"after push 0 .*differs from the trainer in \d+ of 21 tensors"):
        await bridge.push(0)
    assert await loaded(server) == set()
    await bridge.close()


async def test_an_answer_of_other_adapters_than_were_asked_for_is_refused(trained, server):
    _, engine, bridge = trained
    await bridge.push(0)
    engine.confirmed(server.url, 1, "policy")
    engine._replicas.all[0].model = None
    real = engine._client.ask

    async def forged(*arguments, **options):
        answer = await real(*arguments, **options)
        return answer | {"model": "policy-other"} if "choices" in (answer or {}) else answer

    engine._client.ask = forged
    with pytest.raises(EngineError, match="it was sampled by 'policy-other', and 'policy' was asked for"):
        await engine.generate((0, 7), SamplingParams(max_tokens=2, seed=1))


async def test_where_no_checksums_can_be_had_the_probe_stands_in(trained, server, tmp_path, monkeypatch, caplog):
    model, engine, _ = trained

    async def nothing(self):
        return None

    monkeypatch.setattr(WeightServer, "comparable", nothing)
    probe = Probe(score=partial(logprobs_of, model), limit=0.05, vocab_size=24)
    bridge = bridge_of(model, server, tmp_path / "probed", engine, probe=probe)
    change(model, 8)
    await bridge.push(0)
    assert "is checked by the log-probabilities of a few tokens" in caplog.text
    other = adapted()
    change(other, 9)
    wrong = bridge_of(model, server, tmp_path / "wrong", engine, save=partial(save_adapters, other), probe=probe)
    with pytest.raises(WeightMismatchError, match=r"log-probabilities that differ from the trainer's by"):
        await wrong.push(1)
    await wrong.close()
    await bridge.close()
