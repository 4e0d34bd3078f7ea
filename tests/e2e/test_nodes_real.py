"""Ranks of two machines, each started by torchrun with a node rank: here on one, over the loopback device."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S
from parts.runs import RECIPE, ROOT, child_environment, read_jsonl
from parts.stub_runs import eventually

pytestmark = pytest.mark.real

QUICKSTART = ROOT / "recipes" / "quickstart" / "recipe.yaml"
"""Within a minute the rest has ended."""


class Node:
    """torchrun and its rank."""

    def __init__(self, folder: Path, number: int, port: int, recipe: Path, *words: str, mark: str) -> None:
        self._mark = f"{mark}-{number}"
        self.out = folder / f"node-{number}.txt"
        torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)]
        place = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        train = ["-m", "polyturn", "train", str(recipe), f"run.output_dir={folder / 'runs'}", "run.name=nodes", *words]
        with self.out.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, *place, *train],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=child_environment(POLYTURN_TEST_NODE=self._mark, GLOO_SOCKET_IFNAME="lo"),
            )

    @property
    def said(self) -> str:
        return self.out.read_text()

    def end(self, within_s: float) -> int:
        return self.process.wait(within_s)

    def kill(self) -> None:
        """All processes at once, as when a machine is gone."""
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"POLYTURN_TEST_NODE={self._mark}".encode() in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
        self.process.wait(PATIENCE_S)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[object]:
    started: list[Node] = []

    def start(recipe: Path, *words: str, of: tuple[tuple[str, ...], ...] = ((), ())) -> list[Node]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mark = uuid.uuid4().hex
        started.extend(Node(tmp_path, number, port, recipe, *words, *own, mark=mark) for number, own in enumerate(of))
        return started

    yield start
    for node in started:
        node.kill()


def steps_of(folder: Path) -> list[dict[str, float]]:
    path = folder / "runs" / "nodes" / "metrics.jsonl"
    return [line for line in read_jsonl(path) if "num_tokens" in line] if path.exists() else []


def test_two_nodes_train_as_one_process_does(bench, nodes, tmp_path: Path):
    words = ("run.steps=3", "evaluation.episodes=0")
    alone = bench.raw("train", str(QUICKSTART), f"run.output_dir={bench.runs}", *words)
    zero, one = nodes(QUICKSTART, *words)
    assert (zero.end(240), one.end(60)) == (0, 0), zero.said + one.said
    together = steps_of(tmp_path)
    for wanted, found in zip(alone.steps, together, strict=True):
        assert found["reward"] == pytest.approx(wanted["reward"], abs=0.02)
        assert found["policy_age"] == 0
    assert together[0]["grad_norm"] == pytest.approx(alone.steps[0]["grad_norm"], rel=1e-3)
    assert (tmp_path / "runs" / "nodes" / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_one_node_ends_the_other(nodes, tmp_path: Path, colours_model: Path, lost: int):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % {"model": colours_model})
    both = nodes(recipe, "run.steps=100000")
    eventually(lambda: len(steps_of(tmp_path)) >= 2, "the second step")
    time.sleep(0.3)
    both[lost].kill()
    left = both[1 - lost]
    assert left.end(PATIENCE_S) != 0
    named = r"rank 1 \(.+, process \d+\) can't be heard any more" if lost else "the machine of rank 0"
    assert re.search(f"polyturn: error: waited for .* and lost it: .*{named}", left.said), left.said


def test_ranks_with_different_recipes_do_not_start(nodes, tmp_path: Path, colours_model: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % {"model": colours_model})
    zero, one = nodes(recipe, of=((), ("trainer.learning_rate=0.5",)))
    assert zero.end(120) != 0
    assert one.end(60) != 0
    assert "rank 1 has another recipe than rank 0: the section trainer differs" in zero.said, zero.said
