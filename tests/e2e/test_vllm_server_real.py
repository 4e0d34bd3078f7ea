"""Pushes to real vLLM: what arrives, how it is proved, and every fault that can be made to happen to it.

All tests of a server share it, since each start takes half a minute; those that kill it come last.
"""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from parts.patience import PATIENCE_S
from parts.vllm_served import CONTEXT, TOKEN, VllmServed, logprobs_of, needs_vllm, scores, tiny
from polyturn.errors import DeadlineError, EngineError, WeightMismatchError, WeightSyncError
from polyturn.loop.serve_vllm import Orders
from polyturn.processes.descendants import all_pids
from polyturn.processes.json_http import JsonClient
from polyturn.types import SamplingParams
from polyturn.weight_sync.base import WholeWeights
from polyturn.weight_sync.nccl import NcclBridge
from polyturn.weight_sync.probe import Probe
from polyturn.weight_sync.restart import RestartBridge

pytestmark = needs_vllm

PROMPTS = [(0, 7, 9), (0, 5), (3, 3, 8, 11, 20, 6, 1), (1, 2)]


def asking(**options) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "seed": 1, "stop_ids": (4,)} | options))


@pytest.fixture
async def trained(vllm_server):
    """A trainer's model, and engine and bridge of its run."""
    model = tiny(11)
    engine = vllm_server.client()
    await engine.start()
    bridge = vllm_server.bridge(model, engine)
    yield model, engine, bridge
    await bridge.close()
    await engine.stop()


def change(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


async def gap(model, engine) -> float:
    """The largest difference between the engine's log-probabilities and the model's."""
    completions = await asyncio.gather(*(engine.generate(p, asking(seed=s)) for s, p in enumerate(PROMPTS * 3)))
    pairs = zip(PROMPTS * 3, completions, strict=True)
    return max(float((scores(model, p, c) - torch.tensor(c.engine_logprobs)).abs().max()) for p, c in pairs)


async def test_a_push_brings_every_tensor_and_its_version(trained):
    model, engine, bridge = trained
    for version in range(3):
        change(model, version)
        await bridge.push(version)
        assert engine.policy_version == version
        assert await gap(model, engine) < 2e-5
        greedy = await engine.generate(PROMPTS[0], asking(temperature=0.0))
        assert set(greedy.policy_versions) == {version}
        logits = model(input_ids=torch.tensor([[*PROMPTS[0], *greedy.ids]])).logits[0, len(PROMPTS[0]) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(greedy.ids)


async def test_every_tensor_is_checked_by_what_its_layer_computes_with(trained, vllm_server):
    model, _, bridge = trained
    await bridge.push(0)
    names = set(model.state_dict())
    told = await vllm_server.ask("POST", "/collective_rpc", {"method": "polyturn_checksums"})
    assert set(told["results"][0]["checksums"]) == names
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        known = model.state_dict()
        other = {key: tensor + (0.125 if key == name else 0.0) for key, tensor in known.items()}
        sums = {key: bridge_sum(tensor) for key, tensor in other.items()}
        assert [key for key in names if str(sums[key]) != told["results"][0]["checksums"][key]] == [name]


def bridge_sum(tensor):
    from polyturn.weight_sync.base import checksum

    return checksum(tensor, signed_zeros=False)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda weights: weights.pop("model.layers.0.self_attn.k_proj.weight"), "20 of the engine's 21 tensors; missing"),
        (lambda weights: weights.update({"extra": torch.zeros(2)}), "unknown to the engine"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(1)}), "model.norm.weight is"),
    ],
)
async def test_what_does_not_fit_is_refused_before_anything_changes(trained, vllm_server, spoil, said):
    model, engine, bridge = trained
    await bridge.push(0)
    weights = dict(model.state_dict())
    spoil(weights)
    other = NcclBridge([vllm_server.url], WholeWeights(lambda: weights), verify_every=1, deadline_s=PATIENCE_S, token=TOKEN)
    with pytest.raises(WeightSyncError, match=said):
        await other.push(1)
    await other.close()
    assert await gap(model, engine) < 2e-5


async def test_the_servers_own_context_is_what_a_turn_has(trained):
    _, engine, bridge = trained
    await bridge.push(0)
    completion = await engine.generate((7,) * (CONTEXT - 3), asking(max_tokens=50, stop_ids=()))
    assert (len(completion.ids), completion.stop_reason) == (3, "length")
    with pytest.raises(EngineError, match=f"leaves no room in the context of {CONTEXT}"):
        await engine.generate((7,) * CONTEXT, asking())


async def test_every_route_wants_the_token(vllm_server):
    client = JsonClient("a wrong one")
    for method, path in (("POST", "/pause"), ("GET", "/v1/models"), ("POST", "/collective_rpc"), ("GET", "/weight_info")):
        with pytest.raises(Exception, match="answered 401: Unauthorized"):
            await client.ask(method, vllm_server.url + path, limit_s=PATIENCE_S)
    assert await client.ask("GET", vllm_server.url + "/health", limit_s=PATIENCE_S) is None
    await client.close()


# ── caches ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


LONG = tuple(range(5, 24)) * 8


async def test_keys_and_values_of_older_weights_are_noticed(trained, vllm_server):
    """A server that keeps its prefix cache through a push, asked so that it finds what is in there."""
    model, engine, bridge = trained
    await bridge.push(0)

    async def ask():
        body = {"token_ids": list(LONG), "sampling_params": {"temperature": 1.0, "max_tokens": 8, "seed": 3, "logprobs": 0}}
        answer = await vllm_server.ask("POST", "/inference/v1/generate", body)
        (choice,) = answer["choices"]
        return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]

    async def keep_cache(phase, method, path, version, body=None):
        if phase == "reset the prefix cache":
            return [None]
        return await whole(phase, method, f"{path}&clear_cache=false" if phase == "pause" else path, version, body)

    def difference(ids, theirs):
        return float((logprobs_of(model, LONG, ids) - torch.tensor(theirs)).abs().mean())

    assert difference(*await ask()) < 2e-5
    change(model, 5)
    whole, bridge._ask_all = bridge._ask_all, keep_cache
    await bridge.push(1)
    poisoned = await ask()
    assert difference(*poisoned) > 0.01, "it answered from keys and values of older weights, and the comparison shows it"
    # Requests of a run carry their version as the cache's salt, so they don't find what older weights left.
    safe = await engine.generate(LONG, asking(max_tokens=8, stop_ids=()))
    assert float((scores(model, LONG, safe) - torch.tensor(safe.engine_logprobs)).abs().max()) < 2e-5
    bridge._ask_all = whole
    await bridge.push(2)
    assert difference(*await ask()) < 2e-5


async def test_requests_that_wait_through_a_push_are_answered_with_the_new_weights(trained, vllm_server):
    model, engine, bridge = trained
    await bridge.push(0)
    await vllm_server.ask("POST", "/pause?mode=keep")
    waiting = [asyncio.create_task(engine.generate(p, asking(seed=s))) for s, p in enumerate(PROMPTS)]
    await asyncio.sleep(0.2)
    change(model, 6)
    await bridge.push(1)
    for prompt, completion in zip(PROMPTS, await asyncio.gather(*waiting), strict=True):
        assert set(completion.policy_versions) == {1}
        assert float((scores(model, prompt, completion) - torch.tensor(completion.engine_logprobs)).abs().max()) < 2e-5


# ── faults ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_two_runs_on_one_server_are_noticed_by_both(trained, vllm_server):
    _, engine, bridge = trained
    await bridge.push(0)
    other = vllm_server.bridge(tiny(12))
    await other.push(6)
    with pytest.raises(EngineError, match="version 6, and this run has pushed 0 at most: another run pushes to it"):
        await engine.generate((0, 7), asking())
    with pytest.raises(WeightSyncError, match=r"serves weights '6' before push 1.*another run pushes to it"):
        await bridge.push(1)
    await other.close()


async def test_a_trainer_that_is_lost_in_a_push_leaves_a_server_that_the_next_run_mends(trained, vllm_server):
    model, _, bridge = trained
    await bridge.push(0)
    crashed = vllm_server.bridge(tiny(12), deadline_s=20.0)

    def lost(self, names):
        if "model.layers.1.self_attn.q_proj.weight" in names:
            raise RuntimeError("the trainer lost its GPU")
        return {name: self.weights()[name] for name in names}

    crashed._source.gather = partial(lost, crashed._source)
    with pytest.raises(WeightSyncError, match=r"push 1 failed in update, at model\.layers"):
        await crashed.push(1)
    await crashed.close()
    assert (await vllm_server.ask("GET", "/is_paused"))["is_paused"], "it has parts of two versions, and answers nobody"
    state = await vllm_server.ask("POST", "/collective_rpc", {"method": "polyturn_state"})
    assert state["results"][0]["weight_version"] == "broken"
    # The next run knows nothing of it.
    second = vllm_server.client()
    await second.start()
    mending = vllm_server.bridge(model, second)
    await mending.push(0)
    assert await gap(model, second) < 2e-5
    await mending.close()
    await second.stop()


async def test_a_run_that_crashed_between_pause_and_update_leaves_nothing_that_stays(trained, vllm_server):
    model, engine, bridge = trained
    await vllm_server.ask("POST", "/pause?mode=keep")
    await vllm_server.ask("POST", "/start_weight_update")
    await bridge.push(0)
    assert not (await vllm_server.ask("GET", "/is_paused"))["is_paused"]
    assert await gap(model, engine) < 2e-5


def workers_of(server) -> list[int]:
    """The processes of its group that are not its API server."""
    group = os.getpgid(server.process.pid)
    found = []
    for pid in all_pids():
        try:
            if pid != server.process.pid and os.getpgid(pid) == group:
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


async def test_a_server_that_hangs_in_a_push_is_named_within_the_deadline(trained, vllm_server):
    model, engine, bridge = trained
    await bridge.push(0)
    slow = vllm_server.bridge(model, engine, deadline_s=4.0)
    whole = slow._update

    async def then_hang(version, verify):
        for pid in workers_of(vllm_server):
            os.kill(pid, signal.SIGSTOP)
        return await whole(version, verify)

    slow._update = then_hang
    try:
        with pytest.raises(DeadlineError, match=rf"4 s for weight push 1 .*in update.*it waited for {vllm_server.url}"):
            await slow.push(1)
    finally:
        for pid in workers_of(vllm_server):
            os.kill(pid, signal.SIGCONT)
    await slow.close()
    # It goes on, finds that the trainer has left, and is mended by the next push.
    await asyncio.sleep(2)
    later = vllm_server.bridge(model, engine)
    await later.push(2)
    assert await gap(model, engine) < 2e-5
    await later.close()


async def test_a_server_killed_before_a_push_is_named_and_its_log_shown(trained, vllm_server):
    _, engine, bridge = trained
    await bridge.push(0)
    os.killpg(vllm_server.process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"was killed by signal 9 .*while it served; the end of its log, .*vllm\.log"):
        await asyncio.wait_for(vllm_server.process.ended(), 30)
    with pytest.raises(WeightSyncError, match=rf"push 1 failed in check: {vllm_server.url}/collective_rpc can't be reached"):
        await bridge.push(1)
    with pytest.raises(EngineError, match=rf"{vllm_server.url}.* can't be reached"):
        await engine.generate((0, 7), asking())
    await vllm_server.again()


async def test_a_server_killed_after_a_push_and_restarted_with_old_weights_is_noticed(trained, vllm_server):
    model, engine, bridge = trained
    await bridge.push(3)
    # What a restart is to whoever asks: the weights of the start, and no version.
    await vllm_server.ask("POST", "/collective_rpc", {"method": "polyturn_stamp", "args": ["default"]})
    await vllm_server.ask("POST", "/update_weight_version", {"new_version": "default"})
    with pytest.raises(EngineError, match="version 0 after it had confirmed version 3: it was restarted with old weights"):
        await engine.generate((0, 7), asking())
    with pytest.raises(WeightSyncError, match=r"serves weights 'default' before push 4.*restarted with old weights"):
        await bridge.push(4)
    await bridge.push(4)
    assert await gap(model, engine) < 2e-5


async def test_a_server_killed_during_a_push_is_named(trained, vllm_server):
    _, _, bridge = trained
    whole = bridge._update

    async def then_die(version, verify):
        os.killpg(vllm_server.process.pid, signal.SIGKILL)
        return await whole(version, verify)

    bridge._update = then_die
    with pytest.raises(WeightSyncError, match=rf"push 0 failed in update.*{vllm_server.url}/update_weights can't be reached"):
        await bridge.push(0)
    await vllm_server.again()


# ── a tied head that keeps a packed copy ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def stale_head(tmp_path_factory):
    """A server without the cure for what a native reload leaves on CPUs: the head goes on with the weights of the start."""
    server = VllmServed(tmp_path_factory.mktemp("stale"), variables={"POLYTURN_TEST_KEEP_PACKED_HEAD": "1"})
    server.start()
    yield server
    server.stop()


async def test_a_head_on_old_weights_is_found_by_checksums_and_by_log_probabilities(stale_head):
    model = tiny(11)
    bridge = stale_head.bridge(model)
    with pytest.raises(WeightMismatchError, match=r"differs from the trainer in 1 of 21 tensors, first lm_head\.weight"):
        await bridge.push(0)
    await bridge.close()
    # Without checksums: the same server, asked by somebody who only samples.
    await stale_head.ask("POST", "/resume")
    client = JsonClient(TOKEN)
    probe = Probe(score=partial(logprobs_of, model), limit=0.3, vocab_size=24)
    with pytest.raises(
        WeightMismatchError, match=r"differ from the trainer's by .* on average, more than weight_sync\.max_mismatch"
    ):
        await probe.check(client, stale_head.url, 0, limit_s=PATIENCE_S)
    await client.close()


async def test_a_probe_lets_the_right_weights_pass(trained, vllm_server):
    model, _, bridge = trained
    await bridge.push(0)
    client = JsonClient(TOKEN)
    probe = Probe(score=partial(logprobs_of, model), limit=0.3, vocab_size=24)
    assert await probe.check(client, vllm_server.url, 0, limit_s=PATIENCE_S) < 1e-4
    await client.close()


def test_a_server_that_can_not_start_shows_why(tmp_path):
    server = VllmServed(tmp_path, engine={"kind": "vllm_server", "max_model_len": 1 << 20})
    with pytest.raises(EngineError, match=r"(?s)ended with exit code 1 before it was healthy; the end of its log, .*\n  \| "):
        server.start()
    assert server.process.pid is None
    assert Path(server.process._log).read_text()


# ── a restart ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_servers_start_anew_from_saved_weights(vllm_server, tmp_path):
    """The bridge, and what a role does for it. One restart, of three pushes."""
    model = tiny(21)
    engine = vllm_server.client()
    await engine.start()
    orders = Orders(vllm_server.process, token=TOKEN, host="127.0.0.1")
    control = await orders.open()
    bridge = RestartBridge(
        [vllm_server.url],
        [control],
        model.state_dict,
        lambda folder: model.save_pretrained(folder),
        tmp_path / "weights",
        verify_every=1,
        deadline_s=240,
        token=TOKEN,
        on_confirmed=engine.confirmed,
    )
    first = vllm_server.process.pid
    await bridge.push(0)
    second = vllm_server.process.pid
    assert second != first
    assert await gap(model, engine) < 2e-5
    assert engine.policy_version == 0
    assert len(list((tmp_path / "weights").iterdir())) == 1
    await bridge.push(0)
    assert vllm_server.process.pid == second, "it serves that version already"
    again = RestartBridge(
        [vllm_server.url], [control], model.state_dict, lambda folder: None, tmp_path / "other", verify_every=1,
        deadline_s=PATIENCE_S, token=TOKEN,
    )  # fmt: skip
    await again.push(4)
    assert vllm_server.process.pid == second, "a run that finds its own weights there only gives them its version"
    with pytest.raises(EngineError, match="another run pushes to it"):
        await engine.generate((0, 7), asking())
    client = JsonClient("a wrong one")
    with pytest.raises(Exception, match="answered 401"):
        await client.ask("POST", f"{control}/restart", {"model": str(tmp_path), "version": "1"}, limit_s=PATIENCE_S)
    await client.close()
    await bridge.close()
    assert not (tmp_path / "weights").exists()
    await again.close()
    await orders.close()
    await engine.stop()
