"""The `scripted` engine: replies from a script, as real ids. For tests of what is around an engine, and for demonstrations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from polyturn.errors import EngineError
from polyturn.types import Completion, SamplingParams

Script = Callable[[tuple[int, ...]], "tuple[int, ...] | Exception"]
"""From the ids of the whole context to the ids of the reply, stop token included, or an exception to raise."""


class ScriptedEngine:
    """Replies whatever `script` says. Every token gets the same log-probability; stop ids and the token limit cut as in any
    engine. It serves before `start` too, and again after a `stop` once it is started.
    """

    def __init__(self, script: Script, *, logprob: float = -0.5, delay_s: float = 0.0) -> None:
        self.policy_version = 0
        self.requests: list[tuple[tuple[int, ...], SamplingParams]] = []
        self._script = script
        self._logprob = logprob
        self._delay_s = delay_s
        self._stopped = False

    async def start(self) -> None:
        """Serve again after a stop."""
        self._stopped = False

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """The script's reply to `prompt_ids`, up to a stop id or `sampling.max_tokens`. Raises EngineError as any engine."""
        if not prompt_ids or sampling.max_tokens < 1:
            raise EngineError(
                f"a request needs a prompt and room for a token; got {len(prompt_ids)} ids, max_tokens={sampling.max_tokens}"
            )
        self.requests.append((prompt_ids, sampling))
        await asyncio.sleep(self._delay_s)
        if self._stopped:
            raise EngineError("the scripted engine was stopped")
        reply = self._script(prompt_ids)
        if isinstance(reply, Exception):
            raise reply
        stop = next((place for place, token in enumerate(reply) if token in sampling.stop_ids), len(reply))
        ids = reply[: min(stop + 1, sampling.max_tokens)]
        return Completion(
            ids=ids,
            engine_logprobs=(self._logprob,) * len(ids),
            policy_versions=(self.policy_version,) * len(ids),
            stop_reason="stop" if ids and ids[-1] in sampling.stop_ids else "length",
        )

    async def stop(self) -> None:
        """Refuse to serve; what is pending gets EngineError when its delay is over."""
        self._stopped = True
