"""The `scripted` engine: replies from a script, as real ids. For tests of what is around an engine, and for demonstrations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from polyturn.types import Completion, SamplingParams

Script = Callable[[tuple[int, ...]], "tuple[int, ...] | Exception"]
"""From the ids of the whole context to the ids of the reply, stop token included, or an exception to raise."""


class ScriptedEngine:
    """Replies whatever `script` says. Every token gets the same log-probability; the token limit cuts as in any engine."""

    def __init__(self, script: Script, *, logprob: float = -0.5, delay_s: float = 0.0) -> None:
        self.policy_version = 0
        self.requests: list[tuple[tuple[int, ...], SamplingParams]] = []
        self._script = script
        self._logprob = logprob
        self._delay_s = delay_s

    async def start(self) -> None:
        """Nothing to start."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> Completion:
        """The script's reply to `prompt_ids`, cut at `sampling.max_tokens`."""
        self.requests.append((prompt_ids, sampling))
        await asyncio.sleep(self._delay_s)
        reply = self._script(prompt_ids)
        if isinstance(reply, Exception):
            raise reply
        ids = reply[: sampling.max_tokens]
        return Completion(
            ids=ids,
            engine_logprobs=(self._logprob,) * len(ids),
            policy_versions=(self.policy_version,) * len(ids),
            stop_reason="stop" if ids and ids[-1] in sampling.stop_ids else "length",
        )

    async def stop(self) -> None:
        """Nothing to stop."""
