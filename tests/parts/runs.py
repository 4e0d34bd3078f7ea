"""Short runs of the command line on a random model: in this process, or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from parts.environments import PATTERN, WORDS
from parts.models import save_model_folder
from polyturn.cli.main import main

ROOT = Path(__file__).parents[2]

RECIPE = """\
run: {name: short, steps: 2}
model: {path: %(model)s}
environment: {id: "parts.environments:Colours"}
rollout: {group_size: 4, groups_per_step: 2, max_turns: 3, max_turn_tokens: 3, max_trajectory_tokens: 48}
trainer: {learning_rate: 3.0e-3, warmup_steps: 0, threads: 1}
evaluation: {episodes: 4}
"""


@pytest.fixture(scope="session")
def colours_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model that knows the words of `Colours`."""
    return save_model_folder(tmp_path_factory.mktemp("models") / "colours", WORDS, PATTERN)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def folder(self) -> Path:
        """The run folder it named."""
        return Path(next(line for line in self.out.splitlines() if line.startswith("run folder: ")).split(": ", 1)[1])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Its metrics file, line by line."""
        return read_jsonl(self.folder / "metrics.jsonl")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The training steps of its metrics file."""
        return [line for line in self.metrics if "loss" in line or "num_tokens" in line]


class Bench:
    """A folder with a recipe, and commands that run it there."""

    def __init__(self, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE % {"model": model})
        self.runs = folder / "runs"
        self._capsys = capsys

    def __call__(self, verb: str, *words: str) -> Ended:
        """`polyturn VERB recipe.yaml run.output_dir=... WORDS` in this process."""
        return self.raw(verb, str(self.recipe), f"run.output_dir={self.runs}", *words)

    def raw(self, *argv: str) -> Ended:
        """`polyturn ARGV` in this process."""
        self._capsys.readouterr()
        try:
            code = main(list(argv))
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        shown = self._capsys.readouterr()
        return Ended(code, shown.out, shown.err)

    def process(self, verb: str, *words: str, timeout_s: float = 60.0, **environment: str) -> Ended:
        """The same in a process of its own, which must end within `timeout_s`."""
        argv = [sys.executable, "-m", "polyturn", verb, str(self.recipe), f"run.output_dir={self.runs}", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, env=child_environment(**environment))
        return Ended(done.returncode, done.stdout, done.stderr)


def child_environment(**given: str) -> dict[str, str]:
    """The variables of a child process that imports polyturn and these test parts."""
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"), *inherited))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | given


def run_python(code: str, *argv: str, timeout_s: float = 60.0, **environment: str) -> Ended:
    """Python code in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=child_environment(**environment),
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Polyturn's cache, empty when the tests begin: to make `builtin:tiny` takes longer than most tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def bench(
    tmp_path: Path, colours_model: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    """A recipe of two short steps on a random model, its run folders in a temporary folder."""
    monkeypatch.setenv("POLYTURN_CACHE", str(cache))
    return Bench(tmp_path, colours_model, capsys)


def polyturn(folder: Path, *argv: str) -> Ended:
    """`polyturn ARGV` in a process of its own, with a cache of its own in `folder`."""
    words = [sys.executable, "-m", "polyturn", *argv, f"run.output_dir={folder / 'runs'}"]
    environment = child_environment(POLYTURN_CACHE=str(folder / "cache"), OMP_NUM_THREADS="2")
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800, env=environment, cwd=ROOT)
    return Ended(done.returncode, done.stdout, done.stderr)
