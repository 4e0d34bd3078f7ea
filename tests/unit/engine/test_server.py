"""The routes of an engine server: who may, what is refused and how, what a pause does, what becomes of who leaves."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from parts.served import TOKEN, until
from polyturn.engine.hf import HfEngine
from polyturn.engine.server import EngineServer, serve_engine
from polyturn.errors import ConfigError
from polyturn.models.tiny import build_tiny
from polyturn.types import SamplingParams

ROUTES = [
    ("GET", "/v1/models"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/shutdown_weight_transfer_engine"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
    ("GET", "/weight_info"),
    ("GET", "/get_world_size"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/polyturn/weights"),
]


def engine_of(seed=2) -> HfEngine:
    return HfEngine(build_tiny(vocab_size=20, eos_id=4, pad_id=0, seed=seed))


class Asking:
    """A server and someone who asks it, with the token unless told otherwise."""

    def __init__(self, engine, session, server):
        self.engine, self.session, self.server = engine, session, server

    async def __call__(self, method, path, body=None, *, token=TOKEN, raw=None):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with self.session.request(method, self.server.url + path, json=body, data=raw, headers=headers) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, (await answer.json()) if is_json else (await answer.text())

    async def generate(self, **sampling):
        body = {"token_ids": [0, 7], "sampling_params": {"max_tokens": 6, "logprobs": 0, "seed": 1, **sampling}}
        return await self("POST", "/inference/v1/generate", body)


@pytest.fixture
async def ask():
    engine = engine_of()
    server = EngineServer(engine, token=TOKEN, model="tiny")
    await server.start()
    async with aiohttp.ClientSession() as session:
        yield Asking(engine, session, server)
    await server.stop()
    await server.stop()


async def test_every_route_but_health_needs_the_token(ask):
    for method, path in ROUTES:
        for token in (None, "", "wrong", TOKEN + "x", TOKEN[:-1]):
            assert await ask(method, path, token=token) == (401, {"error": "Unauthorized"}), path
    assert (await ask("GET", "/health", token=None))[0] == 200
    assert (await ask("GET", "/is_paused"))[1] == {"is_paused": False}, "no refused request did anything"


async def test_every_route_of_the_page_is_there_and_no_other(ask):
    assert (await ask("GET", "/metrics"))[0] == 404
    assert (await ask("GET", "/pause"))[0] == 405
    found = {(route.method, route.resource.canonical) for route in ask.server._runner.app.router.routes()}
    assert {route for route in found if route[0] != "HEAD"} == {*ROUTES, ("GET", "/health")}


async def test_models_tells_the_context_limit(ask):
    status, answer = await ask("GET", "/v1/models")
    (card,) = answer["data"]
    assert (status, card["id"], card["max_model_len"]) == (200, "tiny", ask.engine.context_limit)


async def test_a_completion_is_that_of_the_engine(ask):
    status, answer = await ask.generate()
    (choice,) = answer["choices"]
    own = await ask.engine.generate((0, 7), SamplingParams(max_tokens=6, seed=1))
    assert status == 200
    assert tuple(choice["token_ids"]) == own.ids
    assert tuple(entry["logprob"] for entry in choice["logprobs"]["content"]) == own.engine_logprobs
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": len(own.ids)}]
    assert (await ask.generate(logprobs=None))[1]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "the body is no JSON"),
        (b"\xff", "the body is no JSON"),
        (b"[" * 100_000, "the body is no JSON"),
        (b"[1]", "the body"),
        (b'{"token_ids": [1]}', "sampling_params"),
        (b'{"token_ids": [99], "sampling_params": {"max_tokens": 1}}', "vocabulary ends at 19"),
    ],
)
async def test_what_is_no_request_is_refused_in_a_sentence_and_the_next_is_served(ask, raw, said):
    status, answer = await ask("POST", "/inference/v1/generate", raw=raw)
    assert status == 400
    assert said in answer["error"]["message"]
    assert answer["error"]["code"] == 400
    assert (await ask.generate())[0] == 200


async def test_a_prompt_longer_than_the_context_is_refused(ask):
    limit = ask.engine.context_limit
    body = {"token_ids": [7] * limit, "sampling_params": {"max_tokens": 1}}
    status, answer = await ask("POST", "/inference/v1/generate", body)
    assert status == 400
    assert f"{limit} tokens" in answer["error"]["message"]


async def test_paused_requests_wait_and_go_on(ask):
    assert await ask("POST", "/pause?mode=keep") == (200, {"status": "paused"})
    assert (await ask("GET", "/is_paused"))[1] == {"is_paused": True}
    waiting = asyncio.create_task(ask.generate())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert await ask("POST", "/resume") == (200, {"status": "resumed"})
    assert (await waiting)[0] == 200
    status, answer = await ask("POST", "/pause?mode=sometimes")
    assert status == 400
    assert "keep, wait and abort" in answer["error"]["message"]


async def test_an_aborted_request_says_so(ask):
    await ask("POST", "/pause?mode=keep")
    waiting = asyncio.create_task(ask.generate())
    await until(lambda: ask.engine._unfinished)
    await ask("POST", "/pause")  # abort is what vLLM does unless told otherwise
    status, answer = await waiting
    (choice,) = answer["choices"]
    assert (status, choice["finish_reason"], choice["token_ids"]) == (200, "abort", [])


async def test_a_client_that_leaves_cancels_its_request(ask):
    await ask("POST", "/pause?mode=keep")
    waiting = asyncio.create_task(ask.generate())
    await until(lambda: ask.engine._unfinished)
    (future,) = ask.engine._unfinished
    waiting.cancel()
    await asyncio.wait({future}, timeout=30)
    assert future.cancelled()
    await ask("POST", "/resume")
    assert (await ask.generate())[0] == 200


async def test_an_engine_that_broke_says_why_on_every_route_that_needs_it(ask):
    def fail(batch, version):
        raise MemoryError("no room for the cache")

    ask.engine._generate = fail
    for _ in range(2):
        status, answer = await ask.generate()
        assert status == 503
        assert "no room for the cache" in answer["error"]["message"]
    status, answer = await ask("GET", "/health")
    assert status == 503
    assert "no room for the cache" in answer["error"]["message"]


async def test_a_log_probability_that_is_nan_keeps_its_kind(ask):
    ask.engine.named_weights()["model.norm.weight"].fill_(float("nan"))
    status, answer = await ask.generate()
    assert (status, answer["error"]["type"]) == (503, "NonFiniteError")


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/start_weight_update", None, 500, "init_weight_transfer_engine comes first"),
        ("/update_weights", {"update_info": {}}, 500, "start_weight_update comes first"),
        ("/finish_weight_update", {"weight_version": "1"}, 500, "start_weight_update comes first"),
        ("/finish_weight_update", {"weight_version": 1}, 400, "whole number as text"),
        ("/finish_weight_update", None, 400, "whole number as text"),
        ("/finish_weight_update", [1], 400, "must be an object"),
        ("/init_weight_transfer_engine", None, 400, "object is needed"),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "127.0.0.1"}}, 400, "master_port"),
    ],
)
async def test_weight_routes_out_of_order_or_without_sense(ask, path, body, status, said):
    found, answer = await ask("POST", path, body)
    assert (found, said in answer["error"]["message"]) == (status, True), answer
    assert (await ask.generate())[0] == 200


async def test_a_group_that_nobody_opened_is_not_joined(ask):
    info = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "timeout_s": 0.2}
    status, answer = await ask("POST", "/init_weight_transfer_engine", {"init_info": info})
    assert status == 500
    assert "the weight transfer group at 127.0.0.1:9" in answer["error"]["message"]
    nccl = {**info, "backend": "nccl"}
    status, answer = await ask("POST", "/init_weight_transfer_engine", {"init_info": nccl})
    assert status == 400
    assert "use gloo" in answer["error"]["message"]


async def test_weights_are_described_with_checksums_when_asked(ask):
    _, plain = await ask("GET", "/polyturn/weights")
    assert plain["weights"]["names"] == list(ask.engine.named_weights())
    assert plain["device"] == "cpu"
    assert "checksums" not in plain
    _, summed = await ask("GET", "/polyturn/weights?checksums=true")
    assert summed["checksums"].keys() == ask.engine.named_weights().keys()
    assert all(int(total) < 1 << 63 for total in summed["checksums"].values())


async def test_small_questions(ask):
    assert (await ask("GET", "/weight_info"))[1] == {"weight_version": "default"}
    assert (await ask("GET", "/get_world_size"))[1] == {"world_size": 1}
    assert (await ask("POST", "/reset_prefix_cache"))[1] == {"success": True}
    assert (await ask("POST", "/shutdown_weight_transfer_engine"))[0] == 200


async def test_a_stop_fails_what_waits():
    engine = engine_of()
    server = EngineServer(engine)
    await server.start()
    async with aiohttp.ClientSession() as session:
        ask = Asking(engine, session, server)
        await ask("POST", "/pause?mode=keep")
        waiting = asyncio.create_task(ask.generate())
        await until(lambda: engine._unfinished)
        await server.stop()
        status, answer = await waiting
        assert status == 500
        assert "stopped" in answer["error"]["message"]


async def test_a_port_that_is_taken_and_a_host_without_a_token_are_refused():
    server = EngineServer(engine_of())
    await server.start()
    taken = EngineServer(engine_of(), port=int(server.url.rpartition(":")[2]))
    with pytest.raises(ConfigError, match=r"can't listen on 127\.0\.0\.1:\d+ .*engine\.port"):
        await taken.start()
    await server.stop()
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 .*needs a token"):
        EngineServer(engine_of(), host="0.0.0.0")


async def test_serve_engine_announces_and_ends_with_its_task():
    said = []
    serving = asyncio.create_task(serve_engine(EngineServer(engine_of()), said.append))
    await until(lambda: said)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{said[0]}/health") as answer:
            assert answer.status == 200
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"{said[0]}/health")
