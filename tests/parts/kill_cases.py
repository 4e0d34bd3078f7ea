"""Runs in processes of their own that are killed and go on, and what they came to."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from parts.kills import comparable, files_of, metrics_of
from parts.patience import PATIENCE_S
from parts.runs import RECIPE, child_environment
from parts.stub_runs import eventually
from polyturn.storage.retention import stored_steps
from polyturn.storage.stores import LocalStore

RUN = ["engine.deterministic=true", "checkpoint.every.disk=1", "evaluation.episodes=0"]
LONGEST_WAIT_S = 1.5
"""From a step to the kill: a step takes some 0.03 s."""


class Cases:
    """A folder with a recipe, and commands in processes of their own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE % {"model": model})

    def start(self, name: str, *words: str, through: tuple[str, ...] = ("-m", "polyturn")) -> subprocess.Popen[str]:
        argv = [
            sys.executable,
            *through,
            "train",
            str(self.recipe),
            f"run.output_dir={self.folder / 'runs'}",
            f"run.name={name}",
        ]
        with (self.folder / f"{name}.txt").open("a") as log:
            return subprocess.Popen(
                [*argv, *RUN, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, env=child_environment()
            )

    def run(self, name: str, *words: str, through: tuple[str, ...] = ("-m", "polyturn")) -> int:
        return self.start(name, *words, through=through).wait(PATIENCE_S)

    def of(self, name: str) -> Path:
        return self.folder / "runs" / name

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def steps(self, name: str) -> int:
        path = self.of(name) / "metrics.jsonl"
        return path.read_text().count("num_tokens") if path.exists() else 0

    def stored(self, name: str) -> list[int]:
        store = LocalStore(self.of(name) / "checkpoints")
        return [found.step for found in stored_steps(store, name) if found.has_manifest]

    def assert_same(self, name: str, other: str) -> None:
        assert comparable(metrics_of(self.of(name))) == comparable(metrics_of(self.of(other))), self.said(name)
        assert files_of(self.of(name)) == files_of(self.of(other)), self.said(name)

    def kill_until_done(self, name: str, words: tuple[str, ...], kills: int, moments: random.Random) -> int:
        """Start the run, kill it at a random moment after a step, and again, `kills` times at most; then let it end.

        Returns how often it was killed: a run that comes through before is not started again.
        """
        killed = 0
        while True:
            run = self.start(name, *words, "--resume")
            self._makes_a_step(name, run)
            if killed < kills:
                time.sleep(moments.uniform(0.0, LONGEST_WAIT_S))
                run.kill()
            if run.wait(PATIENCE_S) == 0:
                return killed
            assert run.returncode == -signal.SIGKILL, self.said(name)
            killed += 1

    def _makes_a_step(self, name: str, run: subprocess.Popen[str]) -> None:
        before = self.steps(name)
        eventually(lambda: self.steps(name) != before or run.poll() is not None, "a step")
