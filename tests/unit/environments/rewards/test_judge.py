"""The judge against a server of the test's own on this machine: scores, cache, retries, budget, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from parts.chat_server import ChatServer as Server
from polyturn.environments.rewards import chat_api
from polyturn.environments.rewards.judge import LlmJudge, read_score
from polyturn.errors import DeadlineError, EnvironmentSetupError, ResourceError
from unit.environments.rewards.scenes import said, task


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Retries wait a hundredth of what they would."""
    sleep = asyncio.sleep
    waited: list[float] = []

    async def short(seconds: float) -> None:
        waited.append(seconds)
        await sleep(seconds / 100)

    monkeypatch.setattr(chat_api.asyncio, "sleep", short)
    return waited


def judge(server: Server, **options: Any) -> LlmJudge:
    return LlmJudge(**({"url": server.url, "model": "m"} | options))


async def ask(made: LlmJudge, text: str = "Lima", **more: Any) -> float:
    return await made(said(text, of=task(**more)), task(**more))


async def test_a_score_between_low_and_high(server):
    assert await ask(judge(server)) == 0.7
    assert await ask(judge(server, low=5.0, high=9.0)) == 0.5
    request = server.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0, 512)
    text = request["messages"][0]["content"]
    for part in ("[user]\nCapital of Peru?", "[assistant]\nLima", "<reference>\nLima", "from 0 (bad) to 10 (perfect)"):
        assert part in text
    assert server.headers[0]["path"] == "/v1/chat/completions"
    assert "Authorization" not in server.headers[0]


async def test_a_prompt_of_ones_own_is_filled_in_once(server):
    made = judge(server, prompt="{question} {reply} {answer} {other} {criteria}", criteria="beauty")
    await ask(made, "{answer} {criteria}")
    assert server.requests[0]["messages"][0]["content"] == "Capital of Peru? {answer} {criteria} Lima {other} beauty"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('Good. {"score": 8}', 8.0),
        ('{"score": 3} no: {"score": 4.5}', 4.5),
        ("Score: 7/10", 7.0),
        ("{'score': '9'}", 9.0),
        ('{"score": -1}', -1.0),
        ("8", None),
        ("", None),
    ],
)
def test_reading_a_score(text, score):
    assert read_score(text) == score


async def test_nonsense_is_asked_again_once_and_then_a_fault(server):
    server.script = ["no idea", '{"score": 4}']
    assert await ask(judge(server)) == 0.4
    server.requests.clear()
    server.script = ["no idea"]
    with pytest.raises(ResourceError, match="the judge m gave no score from 0 to 10, it said 'no idea'"):
        await ask(judge(server))
    assert len(server.requests) == 2
    server.script = ['{"score": 11}']
    with pytest.raises(ResourceError, match="gave no score"):
        await ask(judge(server))


async def test_the_same_question_is_asked_once_in_this_run_and_in_later_ones(server, tmp_path):
    first = judge(server, cache_dir=str(tmp_path))
    assert await asyncio.gather(*(ask(first) for _ in range(8))) == [0.7] * 8
    assert len(server.requests) == 1
    assert first.usage == {"calls": 1, "tokens": 11, "cache_hits": 7}
    later = judge(server, cache_dir=str(tmp_path))
    assert await ask(later) == 0.7
    assert await ask(judge(server, cache_dir=str(tmp_path), low=5.0, high=9.0)) == 0.5, "another prompt, so asked"
    assert len(server.requests) == 2
    assert later.usage["calls"] == 0
    await ask(later, "Cusco")
    assert len(server.requests) == 3


async def test_a_damaged_entry_is_asked_again(server, tmp_path):
    await ask(judge(server, cache_dir=str(tmp_path)))
    (kept,) = tmp_path.rglob("*.json")
    for damage in ("{", '{"score": "x"}', '{"score": NaN}', "[]"):
        kept.write_text(damage)
        assert await ask(judge(server, cache_dir=str(tmp_path))) == 0.7
    assert len(server.requests) == 5


async def test_a_cache_that_can_not_be_written_costs_no_score(server, tmp_path):
    (tmp_path / "file").write_text("")
    assert await ask(judge(server, cache_dir=str(tmp_path / "file"))) == 0.7


@pytest.mark.parametrize(
    "failure",
    [
        (500, {}, b"oops"),
        (429, {"Retry-After": "3"}, b"slow down"),
        (503, {"Retry-After": "soon"}, b""),
        b"not JSON",
        b'{"choices": []}',
        b"[1]",
    ],
)
async def test_what_may_pass_is_tried_again(server, failure, no_waiting):
    server.script = [failure, failure, '{"score": 10}']
    made = judge(server)
    assert await ask(made) == 1.0
    assert made.usage["calls"] == 3
    if isinstance(failure, tuple) and failure[1].get("Retry-After") == "3":
        assert no_waiting == [3.0, 3.0]
    else:
        assert 0.12 < no_waiting[0] < 0.38
        assert 0.25 <= no_waiting[1] <= 0.75


async def test_a_server_that_keeps_failing_is_a_fault(server):
    server.script = [(500, {}, b"  oops\n  again ")]
    with pytest.raises(ResourceError, match=r"failed 3 times, at last with: status 500 \(oops again\)"):
        await ask(judge(server, retries=2))
    assert len(server.requests) == 3


@pytest.mark.parametrize(("status", "headers"), [(401, {}), (404, {}), (400, {}), (302, {"Location": "http://127.0.0.1:9/"})])
async def test_a_refusal_is_not_tried_again(server, status, headers):
    server.script = [(status, headers, b"no such model")]
    with pytest.raises(EnvironmentSetupError, match=f"refused the request: status {status} .*correct url, model or key"):
        await ask(judge(server))
    assert len(server.requests) == 1


async def test_a_server_that_is_not_there(server):
    server.close()
    with pytest.raises(ResourceError, match="failed 2 times, at last with: "):
        await ask(judge(server, retries=1, timeout_s=2.0))


async def test_an_answer_without_end_is_refused(server):
    server.script = [b" " * (chat_api.MOST_BYTES + 1)]
    with pytest.raises(EnvironmentSetupError, match="more than 1,048,576 bytes"):
        await ask(judge(server))


async def test_a_judge_that_hangs_is_late(server):
    server.script = ["hang"]
    with pytest.raises(DeadlineError, match="the judge's score of a:1"):
        await ask(judge(server, deadline_s=0.1))
    assert judge(server)._state._asking == {}


async def test_a_late_judge_holds_up_no_other_question(server):
    server.script = ["hang", '{"score": 2}']
    made = judge(server, deadline_s=0.5)
    late = asyncio.create_task(ask(made, "slow"))
    await asyncio.to_thread(server.asked.wait, 10)
    assert await ask(made, "quick") == 0.2
    with pytest.raises(DeadlineError):
        await late
    assert made._state._asking == {}


@pytest.mark.parametrize(
    ("budget", "said_of_it"),
    [({"max_calls": 2}, "budget of 2 calls is used up; raise max_calls"), ({"max_tokens": 20}, "budget of 20 tokens")],
)
async def test_a_budget_that_is_used_up_is_a_fault(server, budget, said_of_it):
    made = judge(server, **budget)
    assert [await ask(made, text) for text in ("a", "b")] == [0.7, 0.7]
    with pytest.raises(ResourceError, match=said_of_it):
        await ask(made, "c")
    assert await ask(made, "a") == 0.7, "what is known is known"
    assert len(server.requests) == 2


async def test_retries_count_against_the_budget(server):
    server.script = [(500, {}, b"")]
    with pytest.raises(ResourceError, match="budget of 3 calls"):
        await ask(judge(server, max_calls=3, retries=9))
    assert len(server.requests) == 3


async def test_at_most_so_many_at_once(server):
    made = judge(server, concurrency=2)
    await asyncio.gather(*(ask(made, str(n)) for n in range(10)))
    assert len(server.requests) == 10
    assert server.most <= 2


async def test_the_key_comes_from_the_environment_and_goes_nowhere_else(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    made = judge(server, api_key_env="JUDGE_KEY", cache_dir=str(tmp_path))
    await ask(made)
    assert server.headers[0]["Authorization"] == "Bearer very-secret"
    assert "very-secret" not in repr(made)
    assert not [path for path in tmp_path.rglob("*.json") if "very-secret" in path.read_text()]
    server.script = [(401, {}, b"bad key")]
    with pytest.raises(EnvironmentSetupError) as caught:
        await ask(made, "other")
    assert "very-secret" not in str(caught.value)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(EnvironmentSetupError, match="api_key_env=JUDGE_KEY is not set"):
        judge(server, api_key_env="JUDGE_KEY")


async def test_a_proxy_is_not_asked_about_this_machine(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert await ask(judge(server)) == 0.7


def test_one_judge_in_two_event_loops(server):
    made = judge(server)
    assert [asyncio.run(ask(made, text)) for text in ("a", "b")] == [0.7, 0.7]


@pytest.mark.parametrize(
    ("options", "said_of_it"),
    [
        ({"low": 3.0, "high": 3.0}, "low must be less than high"),
        ({"max_calls": 0}, "max_calls=0 must be above 0"),
        ({"deadline_s": -1.0}, "deadline_s=-1.0 must be above 0"),
        ({"url": "ftp://host/v1"}, "is no base of an API"),
        ({"url": "http://"}, "is no base of an API"),
        ({"url": "file:///etc/passwd"}, "is no base of an API"),
    ],
)
def test_settings_that_make_no_sense(options, said_of_it):
    with pytest.raises(EnvironmentSetupError, match=said_of_it):
        LlmJudge(**({"url": "http://127.0.0.1:1/v1", "model": "m"} | options))
