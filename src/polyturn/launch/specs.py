"""What the supervisor knows of a role, and of whoever starts it: no processes, no machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A role that is to be started.

    >>> RoleSpec(name="engine-0", argv=("python", "-m", "polyturn"), environment={}, start_deadline_s=300.0).stage
    0
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables on top of those of the starter."""
    start_deadline_s: float
    """Time until it announces its address; with `members`, until each of them has a heartbeat."""
    deadline_key: str = ""
    """Where the recipe sets that, for a sentence."""
    needs: tuple[str, ...] = ()
    """Roles that must serve before this one starts."""
    members: tuple[str, ...] = ()
    """Roles that this one starts and watches itself. A role without any is expected to serve until the run ends."""

    @property
    def stage(self) -> int:
        """Roles of stage 0 start at once, those of stage 1 after them. They end the other way round."""
        return 1 if self.needs or self.members else 0


class StartedRole(Protocol):
    """A role that was started, wherever it runs."""

    @property
    def pid(self) -> int | None:
        """Its process id, when it is a child of this process."""

    async def wait(self) -> int:
        """Its exit code once it has ended, negative for the signal that ended it. May be called several times."""

    def terminate(self) -> None:
        """Ask it to end. Does nothing when it has ended."""

    def kill(self) -> None:
        """End it and its process group at once."""


class Starter(Protocol):
    """Starts roles."""

    def start(self, spec: RoleSpec, place: Mapping[str, str]) -> StartedRole:
        """Start a role; `place` are the variables of `processes.role.role_environment`. Raises ResourceError if it can't."""
