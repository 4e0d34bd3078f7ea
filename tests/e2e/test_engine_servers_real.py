"""Engine servers in processes of their own: the same tokens as in process, and pushes to servers that die, hang or come back.

Each test starts one or two processes that import torch: about ten seconds each on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parts.engine_process import SIZES, TOKEN, EngineProcess
from parts.patience import PATIENCE_S
from polyturn.engine.hf import HfEngine
from polyturn.engine.http import HttpEngine
from polyturn.errors import DeadlineError, EngineError, WeightSyncError
from polyturn.models.tiny import build_tiny
from polyturn.processes.json_http import AskError, JsonClient
from polyturn.types import SamplingParams
from polyturn.weight_sync.base import WholeWeights
from polyturn.weight_sync.nccl import NcclBridge

pytestmark = pytest.mark.real

PROMPTS = [(0, 7, 9), (0, 5), (3, 3, 8, 11, 20, 6, 1), (1,)]
PART_BYTES = 100_000
"""Small buckets: the tiny model comes in a dozen parts."""


def tiny(seed: int):
    return build_tiny(seed=seed, **SIZES)


@contextlib.asynccontextmanager
async def pushing(*servers: EngineProcess, deadline_s: float = 60.0, seed: int = 1):
    """An engine and a bridge of a trainer to these servers."""
    model = tiny(seed)
    urls = [server.url for server in servers]
    engine = HttpEngine(urls, token=TOKEN, start_deadline_s=PATIENCE_S)
    bridge = NcclBridge(
        urls,
        WholeWeights(model.state_dict),
        verify_every=2,
        deadline_s=deadline_s,
        token=TOKEN,
        bucket_bytes=PART_BYTES,
        on_confirmed=engine.confirmed,
    )
    await engine.start()
    try:
        yield engine, bridge
    finally:
        await engine.stop()
        await bridge.close()


async def is_paused(server: EngineProcess) -> bool:
    client = JsonClient(TOKEN)
    try:
        return (await client.ask("GET", f"{server.url}/is_paused", limit_s=PATIENCE_S))["is_paused"]
    finally:
        await client.close()


async def test_two_servers_say_what_the_engine_in_process_says():
    with EngineProcess(seed=2) as one, EngineProcess(seed=3) as other:
        async with pushing(one, other) as (engine, bridge):
            for version in range(3):
                await bridge.push(version)
                assert engine.policy_version == version
            inside = HfEngine(tiny(1))
            inside.policy_version = 2
            await inside.start()
            for options in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 6, "min_p": 0.01}):
                params = [
                    (p, SamplingParams(max_tokens=24, stop_ids=(4,), seed=s, **options)) for s, p in enumerate(PROMPTS * 4)
                ]
                there = await asyncio.gather(*(engine.generate(p, q, session=str(q.seed)) for p, q in params))
                here = await asyncio.gather(*(inside.generate(p, q) for p, q in params))
                for a, b in zip(there, here, strict=True):
                    assert (a.ids, a.stop_reason, a.policy_versions) == (b.ids, b.stop_reason, b.policy_versions)
                    assert a.engine_logprobs == pytest.approx(b.engine_logprobs, abs=1e-5)
            await inside.stop()


async def test_a_server_killed_before_a_push_is_named_and_the_other_goes_on():
    with EngineProcess(seed=2) as one, EngineProcess(seed=3) as other:
        async with pushing(one, other) as (engine, bridge):
            await bridge.push(0)
            one.kill()
            with pytest.raises(WeightSyncError, match=rf"push 1 failed in check: {one.url}/weight_info can't be reached"):
                await bridge.push(1)
            assert not await is_paused(other)
            answers = await asyncio.gather(*(engine.generate((0, 7), SamplingParams(max_tokens=4)) for _ in range(4)))
            assert [set(answer.policy_versions) for answer in answers] == [{0}] * 4, "the other one answers for both"
            one.begin({"seed": 2})  # for the end of the block


async def test_a_server_killed_during_a_push_is_named_and_the_other_serves_nothing_mixed():
    with EngineProcess(seed=2, fault="kill", at=3) as one, EngineProcess(seed=3) as other:
        async with pushing(one, other) as (engine, bridge):
            with pytest.raises(WeightSyncError, match=rf"push 0 failed in update, at .*: {one.url}/update_weights"):
                await bridge.push(0)
            assert not await is_paused(other)
            lone = HttpEngine([other.url], token=TOKEN)
            with pytest.raises(EngineError, match=r"503: .*(did not complete|not finished)"):
                await lone.start()
            # Once the dead one is back, a push to both mends everything.
            one.again()
            await bridge.push(0)
            assert {(await engine.generate((0, 7), SamplingParams(max_tokens=4))).policy_versions[0] for _ in range(4)} == {0}


async def test_a_server_killed_after_a_push_and_restarted_with_old_weights_is_noticed(caplog):
    with EngineProcess(seed=2) as one, EngineProcess(seed=3) as other:
        async with pushing(one, other) as (engine, bridge):
            await bridge.push(0)
            await bridge.push(1)
            one.again()
            old = rf"{one.url} sampled with weights of version 0 after it had confirmed version 1"
            answers = await asyncio.gather(*(engine.generate((0, 7), SamplingParams(max_tokens=4)) for _ in range(4)))
            assert [set(answer.policy_versions) for answer in answers] == [{1}] * 4, "the other one answers instead"
            assert re.search(old, caplog.text)
            with pytest.raises(WeightSyncError, match=rf"{one.url} serves weights 'default' before push 2.*restarted"):
                await bridge.push(2)
            await bridge.push(2)
            assert engine.policy_version == 2
            both = await asyncio.gather(*(engine.generate((0, 7), SamplingParams(max_tokens=4)) for _ in range(2)))
            assert [set(completion.policy_versions) for completion in both] == [{2}, {2}]


@pytest.mark.parametrize("fault", ["stop", "slow"])
async def test_a_server_that_hangs_in_a_push_is_named_within_the_deadline(fault):
    with EngineProcess(seed=2, fault=fault, at=2) as one, EngineProcess(seed=3) as other:
        async with pushing(one, other, deadline_s=8.0) as (_, bridge):
            with pytest.raises(DeadlineError, match=r"waited 8 s for weight push 0 to 2 engine servers.* in update") as caught:
                await bridge.push(0)
            assert one.url in str(caught.value)
            if fault == "stop":
                assert other.url not in str(caught.value), "the other one is well"
            assert not await is_paused(other)


TRAINER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from parts.engine_process import SIZES, TOKEN
from polyturn.models.tiny import build_tiny
from polyturn.weight_sync.base import WholeWeights
from polyturn.weight_sync.nccl import NcclBridge

async def main():
    model = build_tiny(seed=1, **SIZES)
    bridge = NcclBridge([sys.argv[1]], WholeWeights(model.state_dict), verify_every=9, deadline_s=3.0, token=TOKEN)
    try:
        await bridge.push(0)
    except Exception as error:
        print(type(error).__name__)
    # No close: the process ends with whatever still hangs.

asyncio.run(main())
from polyturn.processes.threads import still_running
print("left", len(still_running()))
"""


def test_a_push_that_hangs_does_not_keep_the_trainer_from_ending():
    """The pushing process ends by itself, soon after the deadline, though its server never answers."""
    with EngineProcess(seed=2, fault="stop", at=1) as one:
        tests = str(Path(__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-c", TRAINER, one.url, tests], capture_output=True, text=True, timeout=PATIENCE_S
        )
    assert done.stdout.splitlines()[0] == "DeadlineError", done.stderr


@contextlib.contextmanager
def a_trainer_of(server: EngineProcess):
    """A process that pushes to `server`, with all the time in the world."""
    words = [sys.executable, "-c", TRAINER.replace("3.0", "600.0"), server.url, str(Path(__file__).parents[1])]
    process = subprocess.Popen(words)
    yield process
    process.kill()
    process.wait(PATIENCE_S)


async def test_a_trainer_killed_during_a_push_leaves_a_server_that_refuses():
    with EngineProcess(seed=2, fault="slow", at=1) as one, a_trainer_of(one) as trainer:
        for _ in range(600):
            if await is_paused(one):
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # into the update
        trainer.kill()
        # A second run finds it half-updated, and says so.
        client = JsonClient(TOKEN)
        for _ in range(300):
            with contextlib.suppress(AskError):
                await client.ask("GET", f"{one.url}/health", limit_s=PATIENCE_S)
                await asyncio.sleep(0.1)
                continue
            break
        await client.close()
        with pytest.raises(EngineError, match="a weight update did not complete"):
            await HttpEngine([one.url], token=TOKEN).start()
