"""The driver's side of saving: copies a state, hands it to the writer, and knows what became of it.

A writer that dies or fails costs checkpoints, never the run: it is told in a sentence, counted, and started again for the
next one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.checkpoint.arena import Arena, lay_out
from polyturn.checkpoint.tree import split
from polyturn.checkpoint.writer import receive, send
from polyturn.checkpoint.writing import CheckpointWriter, Event, Job, Settings
from polyturn.errors import PolyturnError


class Checkpointer:
    """Saves the states of one run: with `separate` in a process, whose output goes to `log`, else where `save` is called.

    `inherited` are descriptors that the writer keeps open for as long as it lives. Methods block, and may be called from any
    thread, one at a time.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        say: Callable[[str], None],
        separate: bool,
        log: Path,
        inherited: Sequence[int] = (),
    ) -> None:
        self._settings = settings
        self._say = say
        self._separate = separate
        self._log = log
        self._inherited = tuple(inherited)
        self._arena = Arena()
        self._writer: _WriterProcess | None = None
        self._changed = threading.Condition()
        self._unwritten: set[int] = set()
        self._under_way: set[int] = set()
        self._failures: dict[int, list[str]] = {}
        self._seconds: dict[str, float] = {}
        self._num_failures = 0

    def start(self) -> None:
        """Start the writer's process ahead of the first job, if there is to be one. Failing to is told, not raised."""
        if self._separate and self._writer is None:
            try:
                self._writer = _WriterProcess(self._settings, self._log, self._inherited, self._on_event, self._on_end)
            except OSError as error:
                self._say(f"the writer of checkpoints can't be started ({error.strerror}); the next checkpoint tries again")

    def reserve(self, state: Any) -> None:
        """Make room for `state` ahead of its first save. No room is told when it is needed."""
        tensors, _ = split(state)
        try:
            self._arena.reserve(lay_out(tensors)[1], pinned=any(tensor.is_cuda for tensor in tensors.values()))
        except OSError:
            return

    @property
    def busy(self) -> bool:
        """Whether the last state is still being written, so that the next one has to wait."""
        with self._changed:
            return bool(self._unwritten)

    def save(self, state: Any, *, step: int, policy_version: int, tiers: Sequence[str], meta: Mapping[str, Any]) -> None:
        """Copy `state` and have it written to `tiers`; with a separate writer this returns when it is copied.

        What goes wrong is told and counted. Whoever trains must not change the state meanwhile.
        """
        assert not self.busy, "the memory is in use"
        tensors, rest = split(state)
        try:
            slots = tuple(self._arena.stage(tensors))
        except OSError as error:
            self._fail(step, f"the checkpoint of step {step} was not saved: no room to copy it to ({error})")
            return
        job = Job(step=step, policy_version=policy_version, tiers=tuple(tiers), slots=slots, rest=rest, meta=meta)
        with self._changed:
            self._unwritten.add(step)
            self._under_way.add(step)
        if self._separate:
            self._hand_over(job)
        else:
            self._write_here(job)

    def wait(self, step: int, deadline_s: float) -> list[str]:
        """Wait until all that was saved has come everywhere. Sentences on what has not, of `step` and whatever is late."""
        until = time.monotonic() + deadline_s
        with self._changed:
            while self._under_way and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            late = [f"the checkpoint of step {step} is not everywhere after {deadline_s:g} s" for step in self._under_way]
            return [*self._failures.get(step, ()), *late]

    def metrics(self) -> dict[str, float]:
        """Since the last call: seconds until a checkpoint was in each tier, and failures, if there were any."""
        with self._changed:
            found = {f"checkpoint/{tier}_s": seconds for tier, seconds in self._seconds.items()}
            if self._num_failures:
                found["checkpoint/failures"] = float(self._num_failures)
            self._seconds, self._num_failures = {}, 0
        return found

    def close(self, deadline_s: float) -> None:
        """Let the writer finish what it has, and end it then, or after `deadline_s`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(deadline_s)
        self._arena.close()

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _write_here(self, job: Job) -> None:
        try:
            writer = CheckpointWriter(self._settings, self._on_event)
        except PolyturnError as error:
            self._lose({job.step}, str(error))
            return
        writer.write(job, self._arena.memory)
        writer.close()

    def _hand_over(self, job: Job) -> None:
        for _ in range(2):  # a writer that has died since is started anew once
            self.start()
            if self._writer is None:
                break
            try:
                self._writer.send(job, self._arena.descriptor)
            except OSError:
                self._writer = None
            else:
                return
        self._lose({job.step}, "there is no writer")

    def _on_event(self, event: Event) -> None:
        kind, step = event["event"], event.get("step", -1)
        if kind == "said":
            self._say(event["sentence"])
        elif kind == "failed":
            self._fail(step, event["sentence"], said=event["said"])
        with self._changed:
            if kind == "tier":
                self._seconds[event["tier"]] = event["seconds"]
            if kind in ("written", "done"):
                self._unwritten.discard(step)
            if kind == "done":
                self._under_way.discard(step)
            self._changed.notify_all()

    def _on_end(self, writer: _WriterProcess, words: str) -> None:
        """The writer's process has ended, whatever for."""
        with self._changed:
            lost = set(self._under_way)
        if lost:
            self._lose(lost, f"the writer of checkpoints {words}; its log is {self._log}")

    def _lose(self, steps: set[int], words: str) -> None:
        for step in sorted(steps):
            self._fail(step, f"the checkpoint of step {step} may not be saved: {words}")
        with self._changed:
            self._unwritten -= steps
            self._under_way -= steps
            self._changed.notify_all()

    def _fail(self, step: int, sentence: str, *, said: bool = False) -> None:
        if not said:
            self._say(sentence)
        with self._changed:
            self._failures.setdefault(step, []).append(sentence)
            self._num_failures += 1


class _WriterProcess:
    """A running `polyturn.checkpoint.writer`, and the thread that listens to it."""

    def __init__(
        self,
        settings: Settings,
        log: Path,
        inherited: tuple[int, ...],
        on_event: Callable[[Event], None],
        on_end: Callable[[_WriterProcess, str], None],
    ) -> None:
        self._on_event, self._on_end = on_event, on_end
        self._connection, theirs = socket.socketpair()
        self._known_memory = -1
        source = str(Path(__file__).parents[2])
        paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        # A thread more would only take a core from whoever trains.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "polyturn.checkpoint.writer", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    pass_fds=(theirs.fileno(), *inherited),
                    start_new_session=True,  # a Ctrl-C at the terminal is not for it
                )
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()
        send(self._connection, settings.to_json())
        self._listener = threading.Thread(target=self._listen, name="hears of checkpoints", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, job: Job, memory: int) -> None:
        """Hand over a job. Raises OSError when it has died."""
        identity = os.fstat(memory).st_ino
        send(self._connection, job.to_json(), None if identity == self._known_memory else memory)
        self._known_memory = identity

    def close(self, deadline_s: float) -> None:
        """Say that nothing more comes, and wait."""
        with contextlib.suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(deadline_s)

    def _listen(self) -> None:
        try:
            while (message := receive(self._connection)) is not None:
                self._on_event(message[0])
        except OSError:
            pass
        code = self._process.wait()
        self._on_end(self, f"was ended by signal {-code}" if code < 0 else f"ended with code {code}")
        self._connection.close()
