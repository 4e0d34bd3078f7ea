"""Which of several engine servers gets a request: the least loaded one first, the same one after, and never one that is lost.

A server is lost when it can't be reached, or answers from older weights than it had confirmed. It comes back when it is
healthy and serves what the others serve: by itself, or once a push brought it there.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MOST_SESSIONS = 1 << 16
"""Sessions whose server is remembered; beyond them the longest unused are forgotten."""
LOOK_EVERY_S = 5.0
"""How often a lost server is asked whether it is back."""


@dataclass(slots=True)
class Replica:
    """One server, and what is known of it."""

    url: str
    under_way: int = 0
    version: int | None = None
    """The last version that it confirmed; None until it got weights."""
    adapter: str | None = None
    """The name by which requests ask for the adapters of that version; None where its own weights are those."""
    model: str | None = None
    """What it calls its model."""
    context_limit: int | None = None
    lost: str | None = None
    """Why no request goes to it."""
    look_at: float = 0.0
    """When it is asked next whether it is back, by the monotonic clock."""


class Replicas:
    """All servers of a client."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Replica(url.rstrip("/")) for url in urls]
        self.newest: int | None = None
        """The newest version that a push confirmed."""
        self._sessions: OrderedDict[str, Replica] = OrderedDict()

    @property
    def version(self) -> int:
        """The least of the versions that would serve a request now; 0 before any got weights."""
        there = [one for one in self.all if one.lost is None] or self.all
        return min(one.version or 0 for one in there)

    def confirmed(self, url: str, version: int, adapter: str | None) -> None:
        """The server at `url` serves `version`, so it is not lost."""
        for one in self.all:
            if one.url == url.rstrip("/"):
                one.version, one.adapter, one.lost = version, adapter, None
                self.newest = max(version, self.newest or 0)

    def choose(self, session: str | None, *, without: Collection[str] = ()) -> Replica | None:
        """The server for a request; None when none is left. `without` are those that it was tried at."""
        fit = [one for one in self.all if one.lost is None and one.url not in without and self._is_current(one)]
        if not fit:
            return None
        chosen = None if session is None else self._sessions.get(session)
        if chosen is None or chosen not in fit:
            chosen = min(fit, key=lambda one: one.under_way)
        if session is not None:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def lose(self, replica: Replica, why: str) -> None:
        """No request goes to it from now on."""
        replica.lost, replica.look_at = why, time.monotonic() + LOOK_EVERY_S

    def to_look_at(self) -> list[Replica]:
        """Lost servers that it is time to ask again; they are not returned again before `LOOK_EVERY_S` have passed."""
        now = time.monotonic()
        due = [one for one in self.all if one.lost is not None and one.look_at <= now]
        for one in due:
            one.look_at = now + LOOK_EVERY_S
        return due

    def back(self, replica: Replica, version: int | None) -> bool:
        """A lost server is healthy and says what it serves: whether requests may go to it."""
        if replica.adapter is None and version == self.newest:
            replica.version, replica.lost = version, None
        return replica.lost is None

    def why_none(self) -> str:
        """What is wrong with the servers, when none can answer."""
        return "; ".join(f"{one.url}: {one.lost or f'serves version {one.version}, not {self.newest}'}" for one in self.all)

    def _is_current(self, one: Replica) -> bool:
        return self.newest is None or (one.version or 0) >= self.newest
