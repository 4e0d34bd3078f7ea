"""Where the driver of a run stands: alone in its process, or among other roles that were started with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyturn.config.schema import Recipe
from polyturn.errors import ConfigError, RankError
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

    def join_ranks(self, recipe: Recipe, *, on_lost: Callable[[RankError], None] | None = None) -> ProcessRanks | None:
        """The group of the trainer's ranks; None where there is one rank. See `ProcessRanks.join`.

        Raises RankError, and ConfigError for ranks whose recipes differ.
        """
        if recipe.trainer.num_ranks == 1:
            return None
        from polyturn.trainer.ranks import ProcessRanks  # brings torch, which an environment process has no use for

        ranks = ProcessRanks.join(
            deadline_s=recipe.trainer.collective_deadline_s,
            start_deadline_s=JOIN_S,
            waiting=self.heartbeat.waiting,
            on_lost=on_lost,
        )
        _refuse_other_recipes(ranks.gather(_facts(recipe), "the recipes of all ranks"))
        return ranks


def _facts(recipe: Recipe) -> dict[str, str]:
    """What ranks must agree on, as text by section."""
    whole = recipe.model_dump(mode="json")
    whole["run"] = {key: value for key, value in whole["run"].items() if key not in ("output_dir", "name", "log_level")}
    for name in ("launch", "logging"):
        del whole[name]
    return {name: json.dumps(section, sort_keys=True) for name, section in whole.items()}


def _refuse_other_recipes(of_ranks: list[dict[str, str]]) -> None:
    for rank, facts in enumerate(of_ranks):
        differing = sorted(name for name in facts.keys() | of_ranks[0].keys() if facts.get(name) != of_ranks[0].get(name))
        if differing:
            raise ConfigError(
                f"rank {rank} has another recipe than rank 0: the section {differing[0]} differs; start all ranks with the "
                "same recipe and overrides"
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
