"""Who hangs: a role that writes no heartbeat any more, or one whose wait has passed its own deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from polyturn.launch.losses import Blame, Loss
from polyturn.processes.descendants import HAS_PROC, process
from polyturn.processes.heartbeat import Beat, Wait, read_heartbeat
from polyturn.processes.role import heartbeat_file

_LATE_S = 5.0
"""A look that comes later than this after the one before says that this process itself stood still."""


class Health:
    """Looks at heartbeats. How old one is is measured here, from when it last changed.

    The times in the files are another clock's: one that was set, or went on while the machine slept, would make everybody
    look dead.
    """

    def __init__(
        self,
        folder: Path,
        *,
        silence_s: float,
        overdue_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._silence_s = silence_s
        self._overdue_s = overdue_s
        self._clock = clock
        self._wall = wall
        self._beats: dict[str, Beat] = {}
        self._changed: dict[str, float] = {}
        self._waits: dict[tuple[str, str, float], float] = {}
        self._looked = clock()

    def look(self, roles: Iterable[str]) -> list[Loss]:
        """Read the heartbeats of the roles that should be alive; those that hang. Roles without one yet are passed over."""
        now = self._clock()
        if now - self._looked > _LATE_S:
            self._changed = {role: when + now - self._looked for role, when in self._changed.items()}
        self._looked = now
        found: list[Loss] = []
        for role in roles:
            beat = self._read(role, now)
            if beat is not None:
                loss = self._silent(role, beat, now, self._silence_s) or self._overdue(role, beat, now)
                found += [] if loss is None else [loss]
        return found

    def beat(self, role: str) -> Beat | None:
        """The last heartbeat of a role, as of the last look."""
        return self._beats.get(role)

    def silent_for(self, roles: Iterable[str], seconds: float) -> list[Loss]:
        """Of `roles`, those that have written nothing for so long, as of now."""
        now = self._clock()
        found = ((role, self._read(role, now)) for role in roles)
        losses = (self._silent(role, beat, now, seconds) for role, beat in found if beat is not None)
        return [loss for loss in losses if loss is not None]

    def _read(self, role: str, now: float) -> Beat | None:
        """The newest heartbeat; an unreadable one counts as none that is new."""
        try:
            beat = read_heartbeat(heartbeat_file(self._folder, role))
        except (OSError, ValueError, TypeError, KeyError):
            beat = None
        if beat is not None and beat != self._beats.get(role):
            self._beats[role], self._changed[role] = beat, now
        return self._beats.get(role)

    def _silent(self, role: str, beat: Beat, now: float, limit_s: float) -> Loss | None:
        age_s = now - self._changed[role]
        if age_s <= limit_s:
            return None
        state = process(beat.pid)
        if HAS_PROC and (state is None or state.ended):
            return None  # it has ended, and whoever started it knows how
        stopped = ", its process is stopped" if state is not None and state.state in "tT" else ""
        return Loss(
            role=role,
            words=f"hangs: no heartbeat for {age_s:.0f} s{stopped}; {_waiting(beat)}",
            blame=Blame.KILLED_OR_SILENT,
            when=self._changed[role],
            hangs=True,
        )

    def _overdue(self, role: str, beat: Beat, now: float) -> Loss | None:
        """A wait is late by its own clock, less what that clock went on by while nothing ran."""
        offset = self._wall() - now
        current = {(role, wait.what, wait.since): wait for wait in beat.waits}
        self._waits = {key: self._waits.get(key, offset) for key in [*(key for key in self._waits if key[0] != role), *current]}
        late: list[tuple[float, Wait]] = []
        for key, wait in current.items():
            if wait.deadline is not None:
                late_s = beat.written - wait.deadline - max(0.0, offset - self._waits[key])
                late += [(late_s, wait)] if late_s > self._overdue_s else []
        if not late:
            return None
        late_s, wait = max(late, key=lambda pair: pair[0])
        return Loss(
            role=role,
            words=f"hangs: it waits for {wait.what}, and is {late_s:.0f} s past its deadline of {_limit(wait)}",
            blame=Blame.ITSELF,
            when=now - late_s,
        )


def _limit(wait: Wait) -> str:
    return f"{round((wait.deadline or 0.0) - wait.since, 3):g} s"


def _waiting(beat: Beat) -> str:
    """What a role waited for at its last heartbeat."""
    if not beat.waits:
        return "it waited for nothing"
    first = beat.waits[0]
    limit = "" if first.deadline is None else f", with a deadline of {_limit(first)}"
    more = f", and {beat.num_waits - 1} more" if beat.num_waits > 1 else ""
    return f"it had waited {max(0.0, beat.written - first.since):.0f} s for {first.what}{limit}{more}"
