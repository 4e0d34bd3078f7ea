"""Starts the roles of a run, notices when one is lost, ends the others in order, and says which one and why.

    start what needs nobody ─> wait for addresses ─> start what needs them ─> watch ─> end, last started first

One loop does all of it: it looks at everything, acts, and sleeps for a moment; a death or a signal wakes it at once. It
waits for nothing without looking at everything else meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyturn.errors import ResourceError
from polyturn.launch.health import Health
from polyturn.launch.losses import OWN_CODES, Blame, Loss, ended, root_cause
from polyturn.launch.specs import RoleSpec, StartedRole, Starter
from polyturn.processes.descendants import HAS_PROC, collect_orphans, descendants, end_descendants
from polyturn.processes.endings import read_ending
from polyturn.processes.role import DRIVER, read_address, role_environment
from polyturn.processes.shared_memory import SharedMemory
from polyturn.processes.tasks import TaskSet

_TIDY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the supervisor waits for what, in seconds."""

    silence_s: float
    """A heartbeat older than this hangs."""
    stop_grace_s: float
    """From the request to end to the kill, for each stage of roles."""
    save_s: float
    """What the driver has to save and end after the first Ctrl-C."""
    overdue_s: float = 15.0
    """How far a wait may be past its own deadline."""
    settle_s: float = 1.0
    """From the first loss to the choice of the one that caused the others."""
    suspect_s: float = 5.0
    """A heartbeat older than this explains another role's complaint that something was lost."""
    look_s: float = 0.2
    """Between two looks when nothing happens."""
    sweep_s: float = 2.0
    """What is left when all roles have ended has this long to end, too."""


@dataclass(slots=True)
class _Running:
    """A role that was started. `code` is set once it has ended."""

    spec: RoleSpec
    started: StartedRole
    since: float
    code: int | None = None
    ended_at: float = 0.0
    address: str | None = None
    ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended; `loss` is what it ended of, if it was that."""

    exit_code: int
    loss: Loss | None = None


@dataclass(slots=True)
class _Requests:
    """What signals have asked for so far: the first one to end in order, any that comes on top of something to end at once."""

    last: int | None = None
    ending: bool = False
    """Whether the run ends already, whatever for."""
    at_once: bool = False
    answered: bool = False
    until: float = float("inf")

    def add(self, number: int) -> None:
        self.at_once |= self.last is not None or self.ending
        self.last = number

    @property
    def exit_code(self) -> int:
        return 128 + (self.last or 0)


class Supervisor:
    """Runs the roles `specs` of the run in `folder`, from start to end. One object is one run.

    With `sweep`, whatever descends from this process is ended after the roles: not for a process that has other children.
    """

    def __init__(
        self,
        specs: Sequence[RoleSpec],
        folder: Path,
        starter: Starter,
        *,
        patience: Patience,
        token: str,
        say: Callable[[str], None],
        sweep: bool = True,
    ) -> None:
        self._specs = specs
        self._folder = folder
        self._starter = starter
        self._patience = patience
        self._token = token
        self._say = say
        self._sweep = sweep
        self._running: dict[str, _Running] = {}
        self._requests = _Requests()
        self._wake = asyncio.Event()
        self._health = Health(folder, silence_s=patience.silence_s, overdue_s=patience.overdue_s)
        self._segments = SharedMemory()
        self._tidied = 0.0
        self._failed_start: Loss | None = None
        self._cause: Loss | None = None

    async def run(self) -> Outcome:
        """Start, watch, end. Returns when nothing is left of any role; raises nothing that a role can cause."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with TaskSet("watches of roles") as self._watches:
                try:
                    return await self._until_over()
                finally:
                    await self._end_all()
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def _until_over(self) -> Outcome:
        """Look and act until there is an outcome."""
        while True:
            self._start_ready()
            losses = self._losses()
            if losses:
                return await self._settled(losses)
            if self._finished():
                return Outcome(exit_code=0)
            if self._requests.last is not None and (outcome := self._on_request()) is not None:
                return outcome
            self._tidy()
            await self._pause(self._patience.look_s)

    # ── starting ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_ready(self) -> None:
        """Note who serves by now, and start whoever waited for them."""
        for role in self._alive():
            if not role.ready:
                self._note_ready(role)
        for spec in self._specs:
            if spec.name in self._running or self._failed_start or self._requests.last is not None:
                continue
            if all(name in self._running and self._running[name].ready for name in spec.needs):
                self._start(spec)

    def _start(self, spec: RoleSpec) -> None:
        peers: dict[str, list[str]] = {}
        for name in sorted(spec.needs, key=lambda name: int(name.rpartition("-")[2])):
            peers.setdefault(name.rpartition("-")[0], []).append(self._running[name].address or "")
        try:
            started = self._starter.start(spec, role_environment(self._folder, peers, self._token))
        except ResourceError as error:
            words = f"could not be started ({error})"
            self._failed_start = Loss(role=spec.name, words=words, blame=Blame.ITSELF, when=time.monotonic())
            return
        self._running[spec.name] = role = _Running(spec, started, time.monotonic())
        self._watches.start(self._watch(role), f"watch of {spec.name}", background=True)

    async def _watch(self, role: _Running) -> None:
        role.code = await role.started.wait()
        role.ended_at = time.monotonic()
        self._wake.set()

    def _note_ready(self, role: _Running) -> None:
        name, took_s = role.spec.name, time.monotonic() - role.since
        if role.spec.members:
            role.ready = all(self._health.beat(member) for member in role.spec.members)
            return
        try:
            role.address = read_address(self._folder, name)
        except (OSError, ValueError, TypeError, KeyError):
            return
        if role.address is not None:
            role.ready = True
            self._say(f"{name} serves at {role.address} after {took_s:.1f} s")

    # ── watching ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _alive(self) -> list[_Running]:
        return [role for role in self._running.values() if role.code is None]

    def _finished(self) -> bool:
        """Whether every role that does not serve, the trainer that is, has ended well."""
        workers = [spec.name for spec in self._specs if spec.members]
        return all(name in self._running and self._running[name].code == 0 for name in workers)

    def _losses(self) -> list[Loss]:
        """All that has gone wrong by now."""
        now = time.monotonic()
        found = [] if self._failed_start is None else [self._failed_start]
        for role in self._running.values():
            found += self._lost_members(role, now)
            if role.code is not None:
                found += self._lost(role)
            elif not role.ready and now - role.since > role.spec.start_deadline_s:
                found.append(self._not_ready(role))
        return found + self._health.look(self._watched())

    def _watched(self) -> list[str]:
        """Roles that should have a fresh heartbeat."""
        return [
            name
            for role in self._alive()
            for name in (role.spec.name, *role.spec.members)
            if name == role.spec.name or self._ending_of(name) is None
        ]

    def _ending_of(self, member: str) -> int | None:
        try:
            return read_ending(self._folder, member)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _lost(self, role: _Running) -> list[Loss]:
        """A role that has ended and should not have."""
        code, name = role.code, role.spec.name
        if code is None or (code == 0 and role.spec.members):
            return []
        if role.spec.members and any(self._ending_of(member) for member in role.spec.members):
            return []  # its end follows from theirs
        return [ended(name, code, role.ended_at)]

    def _lost_members(self, role: _Running, now: float) -> list[Loss]:
        """Members that have ended badly. Whoever watches them ends the others with SIGTERM."""
        codes = ((member, self._ending_of(member)) for member in role.spec.members)
        losses = []
        for member, code in codes:
            if code:
                blame = Blame.ENDED_BY_OTHERS if code == -signal.SIGTERM else None
                losses.append(ended(member, code, now, blame))
        return losses

    def _not_ready(self, role: _Running) -> Loss:
        spec = role.spec
        if spec.members:
            quiet = [member for member in spec.members if self._health.beat(member) is None]
            words = f"did not start {', '.join(quiet) or 'its ranks'} within {spec.start_deadline_s:g} s"
        else:
            key = f" ({spec.deadline_key})" if spec.deadline_key else ""
            words = f"did not serve within {spec.start_deadline_s:g} s of its start{key}"
        when = role.since + spec.start_deadline_s
        return Loss(role=spec.name, words=words, blame=Blame.ITSELF, when=when)

    async def _settled(self, losses: list[Loss]) -> Outcome:
        """Give what follows from the same cause a moment to show, and choose the cause."""
        until = time.monotonic() + self._patience.settle_s
        while time.monotonic() < until and not self._requests.at_once:
            await self._pause(min(self._patience.look_s, max(0.0, until - time.monotonic())))
            known = {loss.role: loss for loss in losses}
            losses = [known.get(loss.role, loss) for loss in self._losses()] or losses
        if self._finished():
            return Outcome(exit_code=0)  # what was lost at the very end was not needed any more
        if (chosen := self._driver_ended()) is not None:
            return Outcome(exit_code=chosen)
        cause = root_cause(losses)
        if cause.blame == Blame.LOST_SOMETHING:
            cause = root_cause([cause, *self._health.silent_for(self._watched(), self._patience.suspect_s)])
        self._cause = cause
        return Outcome(exit_code=cause.exit_code, loss=cause)

    # ── signals ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_signal(self, number: int) -> None:
        self._requests.add(number)
        self._wake.set()

    def _on_request(self) -> Outcome | None:
        """What the signals so far ask for; an outcome when there is nothing to wait for."""
        requests = self._requests
        name = signal.Signals(requests.last or 0).name
        if requests.at_once:
            self._say(f"{name} again: everything ends at once")
            return Outcome(exit_code=requests.exit_code)
        if not requests.answered:
            requests.answered = True
            if not self._ask_driver():
                self._say(f"{name}: nothing is being trained yet; the run ends")
                return Outcome(exit_code=requests.exit_code)
            requests.until = time.monotonic() + self._patience.save_s
            self._say(f"{name}: {DRIVER} is asked to save and end; once more ends everything at once")
        if time.monotonic() > requests.until:
            self._say(f"{DRIVER} was asked to save and end and did not within {self._patience.save_s:g} s; the run ends")
            return Outcome(exit_code=requests.exit_code)
        return None

    def _ask_driver(self) -> bool:
        """Send the driver a SIGINT. False when there is no driver on this machine."""
        beat = self._health.beat(DRIVER)
        if beat is None or beat.host != socket.gethostname():
            return False
        if HAS_PROC and beat.pid not in [member.pid for member in descendants() if not member.ended]:
            return False
        try:
            os.kill(beat.pid, signal.SIGINT)
        except ProcessLookupError:
            return False
        return True

    def _driver_ended(self) -> int | None:
        """The exit code that the driver chose after it was asked to end; None when it was not, or complains itself."""
        code = self._ending_of(DRIVER)
        if code is None:  # whoever watches it is silent about it, and ends as it did
            code = next((role.code for role in self._running.values() if DRIVER in role.spec.members), None)
        if not self._requests.answered or code is None or code in OWN_CODES:
            return None
        return 128 - code if code == -signal.SIGINT else code if code > 0 else None

    # ── ending ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _end_all(self) -> None:
        """End every role that is left, those that started last first, then all that they left behind."""
        self._requests.ending = True
        self._segments.look(_family, again=True)
        for stage in sorted({role.spec.stage for role in self._alive()}, reverse=True):
            await self._end_stage([role for role in self._alive() if role.spec.stage == stage])
        if self._sweep:
            left = end_descendants(grace_s=0.0 if self._requests.at_once else self._patience.sweep_s, limit_s=30.0)
            if left:
                self._say(f"these processes could not be ended: {left}")
        self._segments.sweep()

    async def _end_stage(self, roles: list[_Running]) -> None:
        """Ask, wait, kill."""
        hanging = {loss.role for loss in self._health.silent_for(self._watched(), self._patience.silence_s)}
        hanging |= {self._cause.role} if self._cause is not None and self._cause.hangs else set()
        for role in roles:
            if not hanging & {role.spec.name, *role.spec.members}:
                role.started.terminate()
            else:
                role.started.kill()
        until = time.monotonic() + self._patience.stop_grace_s
        while any(role.code is None for role in roles) and time.monotonic() < until and not self._requests.at_once:
            await self._pause(min(self._patience.look_s, max(0.0, until - time.monotonic())))
        for role in roles:
            role.started.kill()
        gone_by = time.monotonic() + self._patience.stop_grace_s
        while any(role.code is None for role in roles) and time.monotonic() < gone_by:
            await self._pause(self._patience.look_s)

    # ── small things ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _pause(self, seconds: float) -> None:
        """Sleep, unless something happens."""
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except asyncio.TimeoutError:
            return
        self._wake.clear()

    def _tidy(self) -> None:
        """Now and then: collect the dead that were handed to this process, and note who uses which shared memory."""
        if time.monotonic() - self._tidied > _TIDY_S:
            self._tidied = time.monotonic()
            collect_orphans(own={role.started.pid for role in self._running.values()})
            self._segments.look(_family, again=True)
        self._segments.look(_family)


def _family() -> list[int]:
    return [member.pid for member in descendants()]
