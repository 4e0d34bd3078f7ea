"""The protocol every engine speaks: ids in, ids with log-probabilities and policy versions out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from polyturn.types import Completion, SamplingParams


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
