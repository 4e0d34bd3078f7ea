"""Whole runs with several processes, started by the command line, and the question whether anything of one is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parts.patience import PATIENCE_S
from parts.runs import RECIPE, child_environment, read_jsonl
from parts.stub_runs import MARK, Ended, StubRun, eventually
from polyturn.metrics.run_folder import RunFolder

PROCESSES = ("engine.kind=hf_server", "trainer.num_ranks=2", "environment.num_processes=2")
ROLES = ("environment-0", "environment-1", "engine-0", "trainer-agent", "trainer-0", "trainer-1")


class LiveRun(StubRun):
    """`polyturn train RECIPE PROCESSES WORDS` in a process of its own."""

    def __init__(self, folder: Path, recipe: Path, *words: str) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.folder = RunFolder(folder / "runs" / "live")
        environment = {"TMPDIR": str(self.temporary), MARK: self.mark}
        self._files = [(folder / name).open("w+") for name in ("out.txt", "err.txt")]
        argv = [sys.executable, "-m", "polyturn", "train", str(recipe), f"run.output_dir={folder / 'runs'}", "run.name=live"]
        self.process = subprocess.Popen(
            [*argv, *PROCESSES, *words],
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            env=child_environment(**environment),
            start_new_session=True,
        )

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The training steps so far."""
        path = self.folder.metrics
        return [line for line in read_jsonl(path) if "num_tokens" in line] if path.exists() else []

    def trains(self) -> None:
        """Wait for the second step."""
        eventually(lambda: len(self.steps) >= 2 or self.process.poll() is not None, "the second step")
        assert self.process.poll() is None, self.err

    def end(self, limit_s: float = PATIENCE_S) -> Ended:
        code = self.process.wait(limit_s)
        self.assert_nothing_left()
        return Ended(code, self.out, self.err)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        os.kill(self.process.pid, number)


@pytest.fixture
def live_run(tmp_path: Path, colours_model: Path) -> Iterator[Any]:
    """`live_run(WORDS)` starts a run of the short recipe with six processes."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % {"model": colours_model})
    runs: list[LiveRun] = []

    def start(*words: str, recipe: Path = recipe) -> LiveRun:
        runs.append(LiveRun(tmp_path / f"live-{len(runs)}", recipe, *words))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
