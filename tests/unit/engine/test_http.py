"""The client of engine servers: which server gets a request, what it believes, and how each failure is named."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from aiohttp import web

from parts.served import TOKEN, Served, until
from polyturn.engine import replicas as replicas_module
from polyturn.engine.hf import HfEngine
from polyturn.engine.http import HttpEngine
from polyturn.errors import ConfigError, DeadlineError, EngineError, NonFiniteError
from polyturn.models.tiny import build_tiny
from polyturn.types import SamplingParams

ASK = SamplingParams(max_tokens=6, seed=1)


def engine_of(seed=2) -> HfEngine:
    return HfEngine(build_tiny(vocab_size=20, eos_id=4, pad_id=0, seed=seed))


@pytest.fixture
async def three():
    served = Served(engine_of, num_servers=3)
    await served.start()
    yield served
    await served.close()


def count_requests(served) -> list[Counter]:
    """Sessions that each server is asked for, by server."""
    counts = []
    for engine in served.engines:
        count, whole = Counter(), engine.generate

        async def generate(prompt_ids, sampling, *, session=None, count=count, whole=whole):
            count[prompt_ids] += 1
            return await whole(prompt_ids, sampling)

        engine.generate = generate
        counts.append(count)
    return counts


async def test_first_turns_go_to_the_least_loaded_and_later_ones_stay(three):
    counts = count_requests(three)
    for engine in three.engines:
        await engine.pause("keep")  # all are under way at once
    first = [asyncio.create_task(three.generate((0, place), ASK, session=f"s{place}")) for place in range(12)]
    await until(lambda: sum(count.total() for count in counts) == 12)
    assert [count.total() for count in counts] == [4, 4, 4]
    for engine in three.engines:
        engine.resume()
    await asyncio.gather(*first)
    for _ in range(3):
        await asyncio.gather(*(three.generate((0, place), ASK, session=f"s{place}") for place in range(12)))
    assert [sorted(count.values()) for count in counts] == [[4, 4, 4, 4]] * 3, "every turn of a session at one server"


async def test_requests_without_a_session_are_spread(three):
    counts = count_requests(three)
    for engine in three.engines:
        await engine.pause("keep")
    requests = [asyncio.create_task(three.generate((0, 7), ASK)) for _ in range(9)]
    await until(lambda: sum(count.total() for count in counts) == 9)
    for engine in three.engines:
        engine.resume()
    await asyncio.gather(*requests)
    assert [count.total() for count in counts] == [3, 3, 3]


async def test_only_so_many_sessions_are_remembered(three, monkeypatch):
    monkeypatch.setattr(replicas_module, "MOST_SESSIONS", 4)
    for place in range(10):
        await three.generate((0, 7), ASK, session=f"s{place}")
    assert list(three.client._replicas._sessions) == ["s6", "s7", "s8", "s9"]


async def test_what_a_dead_server_does_not_answer_another_one_does(three):
    counts = count_requests(three)
    asked = await three.generate((0, 7), ASK, session="s")
    place = next(place for place, count in enumerate(counts) if count)
    await three.servers[place].stop()
    again = await three.generate((0, 7), ASK, session="s")
    assert again.ids == asked.ids
    await asyncio.gather(*(three.generate((0, 7), ASK) for _ in range(4)))
    assert counts[place].total() == 1
    assert [one.lost is not None for one in three.client._replicas.all] == [other == place for other in range(3)]
    assert [one.under_way for one in three.client._replicas.all] == [0, 0, 0]


async def test_the_last_dead_server_is_named_at_once(three):
    for server in three.servers:
        await server.stop()
    with pytest.raises(EngineError, match=rf"{three.urls[2]}/inference/v1/generate can't be reached"):
        await three.generate((0, 7), ASK)
    with pytest.raises(EngineError, match=rf"no engine server can answer: {three.urls[0]}: .*can't be reached"):
        await three.generate((0, 7), ASK)


async def begin_again(three, place):
    """A server that was stopped, at its old address."""
    three.servers[place]._port = int(three.urls[place].rpartition(":")[2])
    await three.servers[place].start()


async def test_a_server_is_back_once_it_serves_what_the_others_do(three, monkeypatch):
    monkeypatch.setattr(replicas_module, "LOOK_EVERY_S", 0.0)
    counts = count_requests(three)
    client = three.client
    for url, engine, server in zip(three.urls, three.engines, three.servers, strict=True):
        engine.policy_version, server._weights.label = 4, "4"
        client.confirmed(url, 4)
    await three.servers[0].stop()
    await three.generate((0, 7), ASK)
    three.engines[0].policy_version, three.servers[0]._weights.label = 0, "default"
    await begin_again(three, 0)
    before = counts[0].total()
    for _ in range(3):
        await three.generate((0, 7), ASK)
    assert counts[0].total() == before, "it is healthy, but its weights are old"
    assert client.policy_version == 4
    three.engines[0].policy_version, three.servers[0]._weights.label = 4, "4"
    for _ in range(3):
        await three.generate((0, 7), ASK)
    assert counts[0].total() > before


async def test_a_push_brings_a_lost_server_back(three):
    await three.servers[0].stop()
    await three.generate((0, 7), ASK)
    await begin_again(three, 0)
    for engine in three.engines:
        engine.policy_version = 5
    for url in three.urls:
        three.client.confirmed(url, 5)
    assert [one.lost for one in three.client._replicas.all] == [None] * 3


async def test_weights_that_this_run_never_pushed_are_noticed(three):
    for url in three.urls:
        three.client.confirmed(url, 2)
    for engine in three.engines:
        engine.policy_version = 7
    with pytest.raises(EngineError, match=r"version 7, and this run has pushed 2 at most: another run pushes to it"):
        await three.generate((0, 7), ASK)


async def test_the_version_is_the_least_that_the_servers_confirmed(three):
    client = three.client
    assert client.policy_version == 0
    client.confirmed(three.urls[0], 3)
    client.confirmed(three.urls[1] + "/", 4)
    assert client.policy_version == 0
    client.confirmed(three.urls[2], 3)
    assert client.policy_version == 3


async def test_an_answer_from_older_weights_than_were_confirmed_is_refused(three):
    three.client.confirmed(three.urls[0], 5)
    with pytest.raises(EngineError, match=r"version 0 after it had confirmed version 5: it was restarted with old weights"):
        await three.generate((0, 7), ASK)


async def test_a_wrong_token_and_a_context_that_is_full_are_said(three):
    with pytest.raises(EngineError, match=rf"{three.urls[0]}/v1/models answered 401: Unauthorized"):
        await HttpEngine(three.urls, token="wrong").start()
    limit = three.engines[0].context_limit
    with pytest.raises(EngineError, match=f"a prompt of {limit} ids leaves no room in the context of {limit}"):
        await three.generate((7,) * limit, ASK)
    completion = await three.generate((7,) * (limit - 3), SamplingParams(max_tokens=100, seed=1))
    assert (len(completion.ids), completion.stop_reason) == (3, "length")


async def test_a_start_waits_for_servers_and_names_the_one_that_did_not_come():
    served = Served(engine_of)
    await served.servers[0].start()
    url = served.urls[0]
    await served.servers[0].stop()
    with pytest.raises(DeadlineError, match=rf"0\.3 s for the engine server at {url} to be healthy.*can't be reached"):
        await HttpEngine([url], start_deadline_s=0.3).start()
    served.servers[0]._port = int(url.rpartition(":")[2])
    client = HttpEngine([url], token=TOKEN, start_deadline_s=30)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0.15)
    await served.servers[0].start()
    await starting
    assert (await client.generate((0, 7), ASK)).ids
    await client.stop()
    await served.close()


async def test_a_server_that_is_broken_at_the_start_is_an_error_at_once(three):
    three.engines[0]._broken = "no memory"
    with pytest.raises(EngineError, match=r"503: no memory"):
        await HttpEngine(three.urls, token=TOKEN, start_deadline_s=600).start()


async def test_a_nan_is_training_that_must_not_go_on(three):
    for engine in three.engines:
        engine.named_weights()["model.norm.weight"].fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="nan or inf"):
        await three.generate((0, 7), ASK)


async def test_a_completion_has_a_deadline_of_its_own():
    served = Served(engine_of, request_deadline_s=0.1)
    await served.start()
    await served.engines[0].pause("keep")
    with pytest.raises(DeadlineError, match=r"0\.1 s for POST http.*generate"):
        await served.generate((0, 7), ASK)
    assert served.client._replicas.all[0].under_way == 0
    await served.close()


@pytest.mark.parametrize("urls", [[], ["127.0.0.1:8000"], ["http://127.0.0.1:1", "ftp://x"]])
def test_urls_that_are_none(urls):
    with pytest.raises(ConfigError, match="needs the URLs of its servers"):
        HttpEngine(urls)


@pytest.mark.parametrize(
    ("models", "said"),
    [({}, "does not answer as an engine server does"), ({"data": []}, "does not answer as"), ([1], "does not answer as")],
)
async def test_another_kind_of_server_is_no_engine(models, said):
    async def answer(request):
        return web.json_response(models)

    app = web.Application()
    app.add_routes([web.get("/health", answer), web.get("/v1/models", answer), web.get("/weight_info", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with pytest.raises(EngineError, match=said):
        await HttpEngine([f"http://127.0.0.1:{runner.addresses[0][1]}"]).start()
    await runner.cleanup()


# ── what vLLM's versions and settings look like from here ──────────────────────────────────────────────────────────────


class Vllm:
    """A server with some of vLLM's routes, by the answers that they give."""

    def __init__(self, **routes) -> None:
        self.asked: list[dict] = []
        usual = {
            "/health": {},
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 64}]},
            "/weight_info": {"weight_version": "default"},
            "/inference/v1/generate": self.completion(weight_versions=[{"version": "default", "start": 0, "end": 2}]),
        }
        self.routes = {path: answer for path, answer in (usual | routes).items() if answer is not None}

    @staticmethod
    def completion(name="token_id", **more):
        tokens = (
            [{"token_id": 7}, {"token_id": 8}] if name == "token_id" else [{"token": "token_id:7"}, {"token": "token_id:8"}]
        )
        content = [token | {"logprob": -0.5} for token in tokens]
        choice = {"token_ids": [7, 8], "finish_reason": "length", "logprobs": {"content": content}}
        return {"model": "policy", "choices": [choice | more]}

    async def __aenter__(self) -> Vllm:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *error) -> None:
        await self.runner.cleanup()

    async def _answer(self, request):
        answer = self.routes.get(request.path)
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "no"}}, status=answer)
        if request.path == "/inference/v1/generate":
            body = await request.json()
            if not body:
                return web.json_response({"error": {"message": "token_ids is missing"}}, status=400)
            self.asked.append(body)
        return web.json_response(answer)


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (
            {"/inference/v1/generate": 403},
            r"takes no token ids \(/inference/v1/generate answered 403\); start vLLM with --enable-s",
        ),
        ({"/inference/v1/generate": None}, r"takes no token ids \(/inference/v1/generate answered 404\)"),
        (
            {"/server_info": {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}},
            "--logprobs-mode raw_logprobs, which knows nothing of the temperature; start it with --logprobs-mode processed",
        ),
    ],
)
async def test_what_a_server_lacks_is_said_at_the_start(routes, said):
    async with Vllm(**routes) as server:
        with pytest.raises(EngineError, match=said):
            await HttpEngine([server.url]).start()


async def test_an_older_vllm_says_no_versions_and_writes_ids_as_text():
    state = {"results": [{"weight_version": "3"}]}
    routes = {"/weight_info": None, "/collective_rpc": state, "/inference/v1/generate": Vllm.completion("token")}
    async with Vllm(**routes) as server:
        engine = HttpEngine([server.url])
        await engine.start()
        assert engine.policy_version == 3
        engine.confirmed(server.url, 4)
        completion = await engine.generate((0, 7), ASK)
        assert (completion.ids, completion.policy_versions) == ((7, 8), (4, 4))
        await engine.stop()


async def test_adapters_are_asked_for_by_name_and_give_the_version():
    async with Vllm(**{"/inference/v1/generate": Vllm.completion() | {"model": "policy-5"}}) as server:
        engine = HttpEngine([server.url])
        await engine.start()
        engine.confirmed(server.url, 5, "policy-5")
        completion = await engine.generate((0, 7), ASK)
        assert completion.policy_versions == (5, 5)
        assert server.asked[0]["model"] == "policy-5"
        assert server.asked[0]["cache_salt"] == "version 5"
        engine.confirmed(server.url, 6, "policy-6")
        with pytest.raises(EngineError, match="it was sampled by 'policy-5', and 'policy-6' was asked for"):
            await engine.generate((0, 7), ASK)
        server.routes["/inference/v1/generate"] = 404
        with pytest.raises(EngineError, match="answered 404"):
            await engine.generate((0, 7), ASK)
        assert engine._replicas.all[0].lost is not None, "it was restarted, and has no adapters"
        await engine.stop()
