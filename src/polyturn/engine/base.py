"""The protocol every engine speaks: ids in, ids with log-probabilities and policy versions out."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias, runtime_checkable

from polyturn.types import Completion, SamplingParams

Sleep: TypeAlias = Literal["off", "cache", "keep_weights", "drop_weights"]
"""What an engine gives back while it sleeps: keys and values; its weights too, which wait in CPU memory, or come by a push."""


@runtime_checkable
class Engine(Protocol):
    """Generates for many callers at once; batching is the engine's business.

    `policy_version` is the version of the weights that would serve a request arriving now.
    """

    @property
    def policy_version(self) -> int:
        """See above."""

    async def start(self) -> None:
        """Get ready to serve. Raises EngineError or DeadlineError."""

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Sample one completion of `prompt_ids`. Raises EngineError when the engine can't serve.

        Requests of one `session`, the turns of a trajectory, go to the same server where there are several.
        """

    async def stop(self) -> None:
        """Free what `start` took. Safe to call twice."""


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give memory back while it has nothing to do."""

    async def sleep(self) -> None:
        """Give memory back once nobody is being answered. A push, or the next request, takes it again."""
