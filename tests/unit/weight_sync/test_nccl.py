"""The bridge to engine servers when something goes wrong: named, within the deadline, and nobody left paused for nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from parts.served import TOKEN, Served, until
from polyturn.engine.hf import HfEngine
from polyturn.errors import DeadlineError, EngineError, WeightMismatchError, WeightSyncError
from polyturn.models.tiny import build_tiny
from polyturn.types import SamplingParams
from polyturn.weight_sync.base import WholeWeights
from polyturn.weight_sync.nccl import NcclBridge

ASK = SamplingParams(max_tokens=6, seed=1)


def tiny(seed):
    return build_tiny(vocab_size=20, eos_id=4, pad_id=0, seed=seed)


class Scene:
    """A trainer, two servers, the engine of both and the bridge."""

    def __init__(self) -> None:
        self.trainer = tiny(1)
        self.served = Served(lambda: HfEngine(tiny(2)), num_servers=2)
        self.bridges: list[NcclBridge] = []

    @property
    def urls(self):
        return self.served.urls

    @property
    def paused(self):
        return [engine.paused for engine in self.served.engines]

    def bridge(self, **options) -> NcclBridge:
        options = {"verify_every": 100, "deadline_s": 30.0, "token": TOKEN, "bucket_bytes": 50_000, **options}
        confirmed = self.served.client.confirmed
        made = NcclBridge(self.urls, WholeWeights(self.trainer.state_dict), on_confirmed=confirmed, **options)
        self.bridges.append(made)
        return made

    async def both(self):
        """What each server says to the same request."""
        return await asyncio.gather(*(self.served.generate((0, 7, 9), ASK) for _ in range(2)))


@pytest.fixture
async def scene():
    made = Scene()
    await made.served.start()
    yield made
    for bridge in made.bridges:
        await bridge.close()
    await made.served.close()


async def test_both_servers_serve_what_the_trainer_has(scene):
    bridge = scene.bridge()
    inside = HfEngine(tiny(1))
    await inside.start()
    for version in range(3):
        await bridge.push(version)
        assert scene.served.policy_version == version
        await inside.update_weights(scene.trainer.state_dict(), version)
        expected = await inside.generate((0, 7, 9), ASK)
        assert await scene.both() == [expected, expected]
        with torch.no_grad():
            for parameter in scene.trainer.parameters():
                parameter.mul_(1.1)
    assert scene.paused == [False, False]
    await inside.stop()


async def test_requests_wait_for_a_push_and_get_the_new_weights(scene):
    bridge = scene.bridge()
    await bridge.push(0)
    release = threading.Event()
    for engine in scene.served.engines:
        engine.load = hold(engine.load, release)
    push = asyncio.create_task(bridge.push(1))
    await until(lambda: scene.paused == [True, True])
    waiting = asyncio.create_task(scene.both())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    release.set()
    await push
    assert [set(completion.policy_versions) for completion in await waiting] == [{1}, {1}]


def hold(load, release):
    def held(update, weights):
        assert release.wait(30)
        load(update, weights)

    return held


async def test_a_wrong_token_is_said(scene):
    with pytest.raises(WeightSyncError, match=r"push 0 failed in meet: http://\S+/polyturn/weights answered 401: Unauthorized"):
        await scene.bridge(token="wrong").push(0)
    assert scene.paused == [False, False]


async def test_a_server_that_is_gone_is_named(scene):
    bridge = scene.bridge()
    await bridge.push(0)
    await scene.served.servers[1].stop()
    with pytest.raises(WeightSyncError, match=rf"push 1 failed in check: {scene.urls[1]}/weight_info can't be reached"):
        await bridge.push(1)
    assert scene.paused == [False, False]


async def test_a_server_whose_update_breaks_half_way_is_named_and_nobody_serves_mixed_weights(scene):
    bridge = scene.bridge()
    await bridge.push(0)
    engine = scene.served.engines[0]
    whole, parts = engine.load, []

    def breaking(update, weights):
        parts.append(1)
        if len(parts) == 2:
            raise MemoryError("no room for a part")
        whole(update, weights)

    engine.load = breaking
    url = scene.urls[0]
    with pytest.raises(WeightSyncError, match=rf"push 1 failed in update, at .*{url}/update_weights .*no room for a part"):
        await bridge.push(1)
    assert scene.paused == [False, False]
    for one in scene.served.engines:
        with pytest.raises(EngineError, match="weight update"):
            await one.generate((0, 7), ASK)
    await bridge.push(1)
    assert [set(completion.policy_versions) for completion in await scene.both()] == [{1}, {1}]


async def test_a_server_that_hangs_ends_the_push_at_its_deadline(scene):
    release = threading.Event()
    scene.served.engines[1].load = hold(scene.served.engines[1].load, release)
    with pytest.raises(DeadlineError, match=r"waited 1 s for weight push 0 to 2 engine servers.*in update") as caught:
        await scene.bridge(deadline_s=1.0).push(0)
    assert scene.urls[1] in str(caught.value)
    release.set()
    assert scene.paused == [False, False]


async def test_a_push_that_is_cancelled_leaves_nobody_paused(scene):
    release = threading.Event()
    for engine in scene.served.engines:
        engine.load = hold(engine.load, release)
    push = asyncio.create_task(scene.bridge().push(0))
    await until(lambda: scene.paused == [True, True])
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    release.set()
    assert scene.paused == [False, False]


async def test_a_server_with_wrong_weights_stays_paused_and_is_named(scene):
    engine = scene.served.engines[1]
    whole = engine.finish_update

    def spoil(update, version):
        engine.named_weights()["model.norm.weight"][3] += 1
        return whole(update, version)

    engine.finish_update = spoil
    with pytest.raises(WeightMismatchError, match=rf"at {scene.urls[1]} differs .* 1 of 21 tensors, first model\.norm\.weight"):
        await scene.bridge().push(0)
    assert scene.paused == [False, True]


async def test_a_server_that_another_run_took_is_noticed(scene):
    first, second = scene.bridge(), scene.bridge()
    await first.push(0)
    await second.push(7)
    with pytest.raises(WeightSyncError, match=r"serves weights '7' before push 1, and it had confirmed version 0"):
        await first.push(1)


async def test_servers_that_a_crashed_run_left_paused_are_taken_over(scene):
    for engine in scene.served.engines:
        await engine.pause("keep")
    await scene.bridge().push(0)
    assert scene.paused == [False, False]
    assert await scene.both()


async def test_servers_of_unlike_types_are_refused(scene):
    scene.served.engines[1]._model.to(torch.bfloat16)
    with pytest.raises(WeightSyncError, match="in different types"):
        await scene.bridge().push(0)


async def test_narrower_servers_get_what_the_trainer_would_be_as_their_type(scene):
    for engine in scene.served.engines:
        engine._model.to(torch.bfloat16)
    await scene.bridge(verify_every=1).push(0)
    own = scene.served.engines[0].named_weights()
    assert all(torch.equal(own[name], tensor.to(torch.bfloat16)) for name, tensor in scene.trainer.state_dict().items())


async def test_an_address_that_is_not_ours_is_said(scene):
    with pytest.raises(WeightSyncError, match=r"can't listen on 192\.0\.2\.1"):
        await scene.bridge(host="192.0.2.1").push(0)


async def test_only_so_many_pushes_are_verified(scene):
    asked = []
    described = [server._weights.describe for server in scene.served.servers]

    for server, describe in zip(scene.served.servers, described, strict=True):

        async def counting(body, *, checksums, describe=describe):
            asked.append(checksums)
            return await describe(body, checksums=checksums)

        server._weights.describe = counting
    bridge = scene.bridge(verify_every=3)
    for version in range(5):
        await bridge.push(version)
    assert sum(asked) == 4, "pushes 0 and 3, two servers"


# ── servers that may be missing ────────────────────────────────────────────────────────────────────────────────────────


async def begin_again(scene, place):
    """A server that was stopped, at its old address and with the weights that it began with."""
    server, engine = scene.served.servers[place], scene.served.engines[place]
    server._port = int(scene.urls[place].rpartition(":")[2])
    server._weights.label = "default"
    engine.policy_version = 0
    with torch.no_grad():
        for name, tensor in tiny(2).state_dict().items():
            engine.named_weights()[name].copy_(tensor)
    await server.start()


async def test_a_push_may_go_without_a_server_and_brings_it_back_later(scene, caplog):
    bridge, client = scene.bridge(may_miss=True), scene.served.client
    await bridge.push(0)
    await scene.served.servers[0].stop()
    await bridge.push(1)
    assert f"weight push 1 goes without {scene.urls[0]}" in caplog.text
    answers = await scene.both()
    assert {set(answer.policy_versions).pop() for answer in answers} == {1}
    assert scene.served.engines[0].policy_version == 0
    await begin_again(scene, 0)
    assert {set(answer.policy_versions).pop() for answer in await scene.both()} == {1}, "its weights are those of its start"
    await bridge.push(2)
    assert [engine.policy_version for engine in scene.served.engines] == [2, 2]
    assert client.policy_version == 2
    first, second = await scene.both()
    assert first.ids == second.ids


async def test_a_server_that_was_restarted_meanwhile_is_met_anew(scene):
    bridge = scene.bridge(may_miss=True)
    await bridge.push(0)
    await scene.served.servers[1].stop()
    await begin_again(scene, 1)
    await bridge.push(1)
    assert [engine.policy_version for engine in scene.served.engines] == [1, 1]


async def test_a_push_needs_one_server_at_least(scene):
    bridge = scene.bridge(may_miss=True)
    await bridge.push(0)
    for server in scene.served.servers:
        await server.stop()
    with pytest.raises(WeightSyncError, match=r"push 1 failed in look: none of http.*, http.* can be reached"):
        await bridge.push(1)


async def test_another_runs_weights_are_no_restart(scene):
    bridge = scene.bridge(may_miss=True)
    await bridge.push(0)
    await scene.bridge().push(5)
    with pytest.raises(WeightSyncError, match=r"serves weights '5' before push 1.*another run pushes to it"):
        await bridge.push(1)
