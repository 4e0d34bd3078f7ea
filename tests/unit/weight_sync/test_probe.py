"""The log-probability probe, with a server that samples from a known distribution."""

from __future__ import annotations

import pytest

from polyturn.errors import WeightMismatchError
from polyturn.weight_sync.probe import NUM_PROMPTS, Probe


class Server:
    """In place of a client: answers with fixed log-probabilities, and remembers what it was asked."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob
        self.asked: list[dict] = []

    async def ask(self, method, url, body, *, limit_s):
        self.asked.append(body)
        ids = [1, 2, 3]
        content = [{"token_id": token, "logprob": self.logprob} for token in ids]
        return {"choices": [{"token_ids": ids, "logprobs": {"content": content}}]}


def probe(own: float, limit: float = 0.3) -> Probe:
    return Probe(score=lambda prompt, ids: [own] * len(ids), limit=limit, vocab_size=7)


async def test_the_difference_is_the_mean_over_all_tokens():
    server = Server(-1.0)
    assert await probe(-1.25).check(server, "http://x", 3, limit_s=1) == pytest.approx(0.25)
    assert len(server.asked) == NUM_PROMPTS
    assert all(0 <= token < 7 for body in server.asked for token in body["token_ids"])
    assert {body["cache_salt"] for body in server.asked} == {"probe 3"}
    assert all("model" not in body for body in server.asked)


async def test_adapters_are_asked_for_by_name():
    server = Server(-1.0)
    await probe(-1.0).check(server, "http://x", 3, limit_s=1, model="policy-3")
    assert {body["model"] for body in server.asked} == {"policy-3"}


@pytest.mark.parametrize("own", [-1.4, -0.6, float("nan")])
async def test_past_the_limit_the_push_fails(own):
    with pytest.raises(WeightMismatchError, match=r"after push 3 the engine at http://x .*differ from the trainer's by"):
        await probe(own).check(Server(-1.0), "http://x", 3, limit_s=1)
