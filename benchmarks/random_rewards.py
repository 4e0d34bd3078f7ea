"""A task that any policy earns something in, as often as not: for runs that are measured and need not learn."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import ClassVar

from polyturn.environments.base import Reply, StepResult
from polyturn.environments.builtin.lookup import Lookup, State


class RandomRewards(Lookup):
    """`lookup`, whose replies earn 1 when the checksum of their text is odd."""

    name: ClassVar[str] = "random_rewards"

    async def step(self, state: State, reply: Reply) -> StepResult:
        """As `lookup`, and a reward that has nothing to do with it."""
        result = await super().step(state, reply)
        return replace(result, reward=result.reward + zlib.crc32(reply.text.encode()) % 2)
