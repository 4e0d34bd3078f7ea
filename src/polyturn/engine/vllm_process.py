"""A vLLM server as a child of this process: started, awaited, watched, started anew, ended with all of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from polyturn.errors import DeadlineError, EngineError
from polyturn.processes.deadlines import deadline
from polyturn.processes.descendants import all_pids
from polyturn.processes.endings import ending_words
from polyturn.processes.json_http import AskError, JsonClient
from polyturn.processes.parents import PARENT
from polyturn.processes.starting import start_process

GRACE_S = 10.0
"""How long a server may take to end by itself."""
TAIL_LINES = 15
_LOOK_S = 0.1


class VllmProcess:
    """The server at `url`. `command(model)` are vLLM's arguments, `environment(label)` all of its variables.

    What it writes is appended to `log`. Must be used from the main thread's loop: the kernel ties the child to that thread.
    """

    def __init__(
        self,
        url: str,
        *,
        command: Callable[[Path], Sequence[str]],
        environment: Callable[[str], Mapping[str, str]],
        log: Path,
        start_deadline_s: float,
    ) -> None:
        self.url = url
        self._command = command
        self._environment = environment
        self._log = log
        self._start_deadline_s = start_deadline_s
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the server, while there is one."""
        return None if self._child is None else self._child.pid

    @property
    def alive(self) -> bool:
        """Whether there is one that has not ended."""
        return self._child is not None and self._child.poll() is None

    async def start(self, model: Path, label: str) -> None:
        """Start it with the weights in `model`, which are called `label`, and wait until it is healthy.

        Raises EngineError with the end of its log when it ends instead, DeadlineError when it takes too long.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        argv = (sys.executable, "-m", "polyturn.engine.vllm_child", *self._command(model))
        self._child = start_process(argv, {**self._environment(label), PARENT: str(os.getpid())}, self._log)
        client = JsonClient()
        try:
            async with deadline(
                self._start_deadline_s, f"the vLLM server at {self.url} to be healthy (engine.start_deadline_s)"
            ):
                while not await self._healthy(client):
                    self.refuse_ended("before it was healthy")
                    await asyncio.sleep(_LOOK_S)
        except BaseException as error:
            await self.stop()
            if isinstance(error, DeadlineError):
                raise DeadlineError(f"{error}; {self._tail()}") from error
            raise
        finally:
            await client.close()

    async def stop(self) -> None:
        """End it and all of its workers, by the id of their process group. Safe to call twice."""
        child, self._child = self._child, None
        if child is None:
            return
        # Of a server that ended by itself nobody is left who would end its workers in order.
        numbers = (signal.SIGTERM, signal.SIGKILL) if child.poll() is None else (signal.SIGKILL,)
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            for _ in range(max(1, int(GRACE_S / _LOOK_S))):
                if child.poll() is not None and not _group_lives(child.pid):
                    return
                await asyncio.sleep(_LOOK_S)

    async def ended(self) -> None:
        """Wait until it ends by itself. Raises EngineError then, always."""
        while True:
            self.refuse_ended("while it served")
            await asyncio.sleep(_LOOK_S)

    def refuse_ended(self, when: str) -> None:
        """Raise EngineError when the server is no more, with the end of its log."""
        code = None if self._child is None else self._child.poll()
        if code is not None:
            raise EngineError(f"the vLLM server at {self.url} {ending_words(code)} {when}; {self._tail()}")

    async def _healthy(self, client: JsonClient) -> bool:
        try:
            await client.ask("GET", f"{self.url}/health", limit_s=self._start_deadline_s)
        except AskError:
            return False
        return True

    def _tail(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - 16_384))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            lines = []
        shown = "\n".join(f"  | {line[:400]}" for line in lines[-TAIL_LINES:])
        return f"the end of its log, {self._log}:\n{shown}"


def _group_lives(group: int) -> bool:
    """Whether anybody of a process group is left; the dead that nobody has collected don't count."""
    for pid in all_pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
            return True
    return False
