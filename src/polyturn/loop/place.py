"""Where the driver of a run stands: alone in its process, or among other roles that were started with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyturn.config.schema import Recipe
from polyturn.processes.heartbeat import Heartbeat
from polyturn.processes.role import DRIVER, Role

if TYPE_CHECKING:
    from polyturn.trainer.ranks import ProcessRanks

JOIN_S = 600.0
"""For all ranks to load the model and meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Its peers, and where it writes what it waits for."""

    role: Role
    heartbeat: Heartbeat

    def waiting(self, what: str, deadline_s: float | None = None) -> AbstractContextManager[None]:
        """Show a wait to whoever looks from outside."""
        return self.heartbeat.waiting(what, deadline_s)

    def join_ranks(self, recipe: Recipe) -> ProcessRanks | None:
        """The group of the trainer's ranks; None where there is one rank. Raises RankError."""
        if recipe.trainer.num_ranks == 1:
            return None
        from polyturn.trainer.ranks import ProcessRanks  # brings torch, which an environment process has no use for

        return ProcessRanks.join(
            deadline_s=recipe.trainer.collective_deadline_s, start_deadline_s=JOIN_S, waiting=self.heartbeat.waiting
        )


@contextmanager
def taken(role: Role) -> Iterator[Place]:
    """The place of `role`, with its heartbeat going for the length of the block."""
    with role.heartbeat() as heartbeat:
        yield Place(role=role, heartbeat=heartbeat)


def alone(folder: Path) -> AbstractContextManager[Place]:
    """The place of a driver without other processes."""
    return taken(Role(name=DRIVER, folder=folder))


def unseen(folder: Path) -> Place:
    """The place of a driver whose waits nobody looks at."""
    role = Role(name=DRIVER, folder=folder)
    return Place(role=role, heartbeat=role.heartbeat())
