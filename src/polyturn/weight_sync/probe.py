"""The log-probability probe: a server samples a few tokens, and the trainer says how probable they are under its weights.

It needs nothing of a server but that it samples, so it stands in where checksums can't be had. It is coarser: it sees weights
that are plainly others, not one changed bit, nor a step of training too small to move a log-probability past the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyturn.errors import WeightMismatchError
from polyturn.processes.json_http import JsonClient
from polyturn.processes.threads import in_thread

GENERATE = "/inference/v1/generate"
NUM_PROMPTS, NUM_TOKENS = 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """`score(prompt, ids)` are the trainer's log-probabilities of `ids` after `prompt`; blocks.

    `limit` is the largest mean difference that counts as the same weights. Prompts are of ids below `vocab_size`.
    """

    score: Callable[[Sequence[int], Sequence[int]], Sequence[float]]
    limit: float
    vocab_size: int

    async def check(self, client: JsonClient, url: str, version: int, *, limit_s: float, model: str | None = None) -> float:
        """The mean difference at the server at `url`, asked for `model`. Raises WeightMismatchError when it is past the limit.

        Raises AskError for a server that doesn't sample.
        """
        gaps: list[float] = []
        for number in range(NUM_PROMPTS):
            prompt = [(17 * number + 5 * place + 1) % self.vocab_size for place in range(4 + number)]
            answer: Any = await client.ask("POST", url + GENERATE, _request(prompt, number, version, model), limit_s=limit_s)
            content = answer["choices"][0]["logprobs"]["content"]
            ids, theirs = answer["choices"][0]["token_ids"], [float(entry["logprob"]) for entry in content]
            ours = await in_thread(self.score, prompt, ids)
            gaps += [abs(float(own) - other) for own, other in zip(ours, theirs, strict=True)]
        gap = sum(gaps) / len(gaps)
        if not gap <= self.limit:
            raise WeightMismatchError(
                f"after push {version} the engine at {url} gives its own tokens log-probabilities that differ from the "
                f"trainer's by {gap:.3g} on average, more than weight_sync.max_mismatch={self.limit:g}; it would sample from "
                "stale or mixed weights"
            )
        return gap


def _request(prompt: Sequence[int], seed: int, version: int, model: str | None) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "seed": seed, "logprobs": 0}
    sampling |= {"ignore_eos": True, "detokenize": False}
    # A salt that nobody else has: keys and values of a rollout must not answer for the weights.
    body = {"token_ids": list(prompt), "sampling_params": sampling, "cache_salt": f"probe {version}"}
    return body if model is None else {**body, "model": model}
