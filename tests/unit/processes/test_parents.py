"""A process that ends with its parent, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S
from parts.stub_runs import eventually, runs

CHILD = """
import os, signal, sys, time
from polyturn.processes import parents
parents._LOOK_S = 0.05
{how}
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
environment = os.environ | {"POLYTURN_PARENT_PID": str(os.getpid())}
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
time.sleep(600)
"""


def orphan(how: str) -> int:
    """A child whose parent was killed after it was ready; its process id."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    argv = [sys.executable, "-c", PARENT, CHILD.format(how=how)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    return child


@pytest.mark.parametrize(
    "how",
    [
        "parents.die_with_starter()",
        "parents.die_with_parent(signal.SIGTERM, os.getppid())",
        # It takes no notice of the request, and is killed.
        "signal.signal(15, signal.SIG_IGN); parents.die_with_parent(signal.SIGTERM, os.getppid(), kill_after_s=0.1)",
        # Where the kernel doesn't tell.
        "parents._prctl = lambda *_: False; parents.die_with_parent(signal.SIGTERM, os.getppid())",
    ],
    ids=["starter", "told", "killed", "without prctl"],
)
def test_nobody_outlives_a_parent_that_is_killed(how):
    child = orphan(how)
    eventually(lambda: not runs(child), "the end of the child")


def test_a_parent_that_is_gone_already():
    code = "import signal; from polyturn.processes.parents import die_with_parent; die_with_parent(signal.SIGTERM, 1 << 22)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, env=environment).returncode == -signal.SIGTERM


def test_nobody_says_who_the_starter_is(monkeypatch):
    from polyturn.processes import parents

    monkeypatch.delenv(parents.PARENT, raising=False)
    monkeypatch.setattr(parents, "die_with_parent", lambda *_, **__: pytest.fail("it has no starter"))
    parents.die_with_starter()
