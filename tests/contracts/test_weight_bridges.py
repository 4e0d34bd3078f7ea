"""What every weight bridge promises: all of the weights, the version confirmed, checksums, an end within the deadline."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from parts.vllm_served import PushedVllm, needs_vllm, scores
from parts.vllm_served import tiny as vllm_tiny
from parts.vllm_stub import SharingStub, module_of
from polyturn.engine.hf import HfEngine
from polyturn.engine.server import EngineServer
from polyturn.errors import DeadlineError, EngineError, ResourceError, WeightMismatchError, WeightSyncError
from polyturn.models.tiny import build_tiny
from polyturn.types import SamplingParams
from polyturn.weight_sync.base import WholeWeights
from polyturn.weight_sync.in_process import InProcessBridge
from polyturn.weight_sync.nccl import NcclBridge
from polyturn.weight_sync.single_copy import SharedModel
from polyturn.weight_sync.single_copy_server import SingleCopyServerBridge


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "embed": torch.randn(6, 4, generator=generator),
        "layer.q": torch.randn(4, 4, generator=generator),
        "norm": torch.ones(4),
        "scale": torch.tensor(0.5),
    }


class Target:
    """An engine's side. `spoil` changes what arrives."""

    def __init__(self, spoil=None, *, dtype=torch.float32):
        self.own = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in weights().items()}
        self.spoil = spoil
        self.pushes = []
        self.claims = None

    def named_weights(self):
        return self.own

    async def before_update(self):
        pass

    async def update_weights(self, given, version):
        await self.before_update()
        for name, tensor in self.own.items():
            tensor.copy_(given[name])
        return self.took(version)

    def took(self, version):
        self.pushes.append(version)
        if self.spoil is not None:
            self.spoil(self.own)
        return version if self.claims is None else self.claims


class ServedTarget(HfEngine):
    """A target behind the parts of an engine that an engine server needs for a push."""

    def __init__(self, target):
        super().__init__(module_of(target.own))
        self.target = target

    async def begin_update(self):
        await self.target.before_update()
        return await super().begin_update()

    def finish_update(self, update, version):
        super().finish_update(update, version)
        return self.target.took(version)


class OverHttp:
    """The nccl bridge with a server around the target, which starts with the first push."""

    def __init__(self, source, target, *, verify_every=1, deadline_s=30.0):
        self.options = {"verify_every": verify_every, "deadline_s": deadline_s, "bucket_bytes": 64}
        self.source = source
        self.server = EngineServer(target if isinstance(target, HfEngine) else ServedTarget(target), token="t")
        self.bridge = None

    async def push(self, version):
        if self.bridge is None:
            await self.server.start()
            self.bridge = NcclBridge([self.server.url], WholeWeights(lambda: self.source), token="t", **self.options)
        await self.bridge.push(version)

    async def close(self):
        if self.bridge is not None:
            await self.bridge.close()
            await self.server.stop()


class SharingTarget(SharingStub):
    """A target behind a server that shares its weights and computes with copies of them, which are the target's."""

    def __init__(self, target):
        super().__init__({name: tensor.clone() for name, tensor in target.own.items()}, token="t")
        self.packed, self.target = target.own, target

    async def before_stamp(self):
        await self.target.before_update()

    def stamped(self, version):
        return self.target.took(version)


class Shared:
    """The single_copy bridge to a server beside it, which starts with the first push."""

    def __init__(self, source, target, *, verify_every=1, deadline_s=30.0):
        self.options = {"verify_every": verify_every, "deadline_s": deadline_s, "token": "t"}
        self.source, self.server = source, SharingTarget(target)
        self.bridge = None

    async def push(self, version):
        if self.bridge is None:
            await self.server.start()
            self.bridge = SingleCopyServerBridge([self.server.url], SharedModel(module_of(self.source)), **self.options)
        await self.bridge.hold(version)
        await self.bridge.push(version)

    async def close(self):
        if self.bridge is not None:
            await self.bridge.close()
            await self.server.stop()


def in_process(source, target, *, verify_every=1, deadline_s=30.0):
    return InProcessBridge(lambda: source, target, verify_every=verify_every, deadline_s=deadline_s)


BRIDGES = {"in_process": in_process, "nccl": OverHttp, "single_copy": Shared}
with_a_copy = pytest.mark.parametrize("bridge_of", ["in_process", "nccl"], indirect=True)
"""For what a bridge promises whose engine has weights of its own."""


@pytest.fixture(params=BRIDGES)
async def bridge_of(request):
    made = []

    def make(*arguments, **options):
        made.append(BRIDGES[request.param](*arguments, **options))
        return made[-1]

    yield make
    for bridge in made:
        await bridge.close()


@with_a_copy
async def test_a_push_brings_every_tensor(bridge_of):
    source, target = weights(), Target()
    await bridge_of(source, target).push(3)
    assert target.pushes == [3]
    assert all(torch.equal(target.own[name], tensor) for name, tensor in source.items())
    source["norm"] += 1
    assert not torch.equal(target.own["norm"], source["norm"]), "the engine has a copy of its own"


async def test_a_push_says_what_its_phases_took(bridge_of):
    bridge, began = bridge_of(weights(), Target()), time.perf_counter()
    await bridge.push(3)
    took, served = time.perf_counter() - began, getattr(bridge, "bridge", None)
    seconds = bridge.seconds if served is None else served.seconds
    assert all(0 <= one <= took for one in seconds.values())
    assert {"pause", "resume"} <= seconds.keys() if served else not seconds


@with_a_copy
async def test_a_push_may_narrow_the_type(bridge_of):
    source, target = weights(), Target(dtype=torch.bfloat16)
    await bridge_of(source, target).push(0)
    assert torch.equal(target.own["embed"], source["embed"].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda source: source.pop("layer.q"), ["3 of the engine's 4", "layer.q"]),
        (lambda source: source.update({"lm_head": torch.zeros(2)}), ["4 of the engine's 4", "lm_head"]),
        (lambda source: source.update({"norm": torch.ones(1)}), ["norm", "(1,)", "(4,)"]),
        (lambda source: source.update({"embed": torch.ones(4, 6)}), ["embed", "(4, 6)", "(6, 4)"]),
    ],
    ids=["missing", "extra", "would broadcast", "transposed"],
)
async def test_a_push_that_does_not_fit_is_refused_before_anything_changes(bridge_of, change, said):
    source, target = weights(), Target()
    change(source)
    with pytest.raises(WeightSyncError) as caught:
        await bridge_of(source, target).push(1)
    assert [part for part in said if part not in str(caught.value)] == []
    assert target.pushes == []
    assert not target.own["embed"].any()


async def test_a_push_is_confirmed_or_fails(bridge_of):
    target = Target()
    target.claims = 4
    with pytest.raises(WeightSyncError, match="push 5 was not confirmed: the engine serves version 4"):
        await bridge_of(weights(), target).push(5)


def flip_one_bit(own):
    own["layer.q"].view(torch.int32)[1, 2] ^= 1


def swap_two_values(own):
    row = own["embed"][2].clone()
    own["embed"][2, 0], own["embed"][2, 3] = row[3], row[0]


def keep_the_old_norm(own):
    own["norm"].zero_()


@pytest.mark.parametrize(
    ("spoil", "name"), [(flip_one_bit, "layer.q"), (swap_two_values, "embed"), (keep_the_old_norm, "norm")]
)
async def test_a_push_that_arrives_changed_is_found(bridge_of, spoil, name):
    with pytest.raises(WeightMismatchError, match=f"push 2 .* 1 of 4 tensors, first {name}"):
        await bridge_of(weights(), Target(spoil)).push(2)


async def test_checksums_at_the_first_push_and_every_nth(bridge_of):
    target = Target()
    bridge = bridge_of(weights(), target, verify_every=4)
    found = []
    for version in range(10):
        # The first push must be right, or no later one is reached.
        target.spoil = flip_one_bit if version else None
        try:
            await bridge.push(version)
        except WeightMismatchError:
            found.append(version)
            target.spoil = None
            await bridge.push(version)
    assert found == [4, 8]


async def test_a_failed_push_is_verified_when_it_is_tried_again(bridge_of):
    target = Target(flip_one_bit)
    bridge = bridge_of(weights(), target, verify_every=100)
    for _ in range(2):
        with pytest.raises(WeightMismatchError):
            await bridge.push(0)


async def test_a_push_ends_within_its_deadline(bridge_of):
    class Stuck(Target):
        async def before_update(self):
            await asyncio.sleep(3600)

    bridge = bridge_of(weights(), Stuck(), deadline_s=0.05)
    with pytest.raises(DeadlineError, match=r"0\.05 s for weight push 9"):
        await bridge.push(9)
    await bridge.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_push_into_an_engine_that_is_gone_says_so(bridge_of):
    class Dead(Target):
        async def before_update(self):
            raise EngineError("the engine died")

    with pytest.raises(ResourceError, match="the engine died"):
        await bridge_of(weights(), Dead()).push(1)


# ── with a real engine ─────────────────────────────────────────────────────────────────────────────────────────────────


def tiny(seed):
    return build_tiny(vocab_size=20, eos_id=4, pad_id=0, seed=seed)


@with_a_copy
async def test_the_hf_engine_serves_the_pushed_weights(bridge_of):
    trainer, engine, other = tiny(1), HfEngine(tiny(2)), HfEngine(tiny(1))
    sampling = SamplingParams(max_tokens=6, seed=3)
    await engine.start()
    await other.start()
    before = await engine.generate((0, 7, 9), sampling)
    await bridge_of(dict(trainer.state_dict()), engine).push(5)
    after = await engine.generate((0, 7, 9), sampling)
    assert after.engine_logprobs == (await other.generate((0, 7, 9), sampling)).engine_logprobs
    assert after.engine_logprobs != before.engine_logprobs
    assert engine.policy_version == 5
    assert set(after.policy_versions) == {5}
    await engine.stop()
    await other.stop()


@with_a_copy
async def test_every_parameter_of_the_hf_engine_is_covered(bridge_of):
    trainer, engine = tiny(1), HfEngine(tiny(2))
    names = {name for name, _ in trainer.named_parameters(remove_duplicate=False)}
    assert names <= set(engine.named_weights())
    for name in names:
        source = dict(trainer.state_dict())
        del source[name]
        with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
            await bridge_of(source, engine).push(1)


# ── with vLLM ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=needs_vllm) for seed in (31, 32)])
async def test_vllm_serves_the_pushed_weights(vllm_server, seed):
    model, sampling = vllm_tiny(seed), SamplingParams(max_tokens=6, seed=3)
    engine = PushedVllm(vllm_server, model)
    await engine.start()
    after = await engine.generate((0, 7, 9), sampling)
    assert torch.allclose(torch.tensor(after.engine_logprobs), scores(model, (0, 7, 9), after), atol=1e-5)
    assert set(after.policy_versions) == {0}
    await engine.stop()


@pytest.mark.parametrize("missing", [pytest.param(name, marks=needs_vllm) for name in vllm_tiny(1).state_dict()])
async def test_every_parameter_of_vllm_is_covered(vllm_server, missing):
    bridge = vllm_server.bridge(vllm_tiny(1))
    weights = {name: tensor for name, tensor in vllm_tiny(1).state_dict().items() if name != missing}
    bridge._source = WholeWeights(lambda: weights)
    with pytest.raises(WeightSyncError, match=missing.replace(".", r"\.")):
        await bridge.push(1)
    await bridge.close()
