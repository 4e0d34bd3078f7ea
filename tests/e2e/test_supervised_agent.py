"""Supervisor, elastic agent and ranks together: the ranks are stubs, so that what happens to them is known."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from parts.stub_runs import HERE, engine, eventually, stub_run

__all__ = ["stub_run"]

pytestmark = pytest.mark.real

AGENT = """
import sys
from polyturn.processes.parents import die_with_starter
from polyturn.processes.role import Role
die_with_starter()
from polyturn.trainer.agent import run_agent
sys.exit(run_agent(Role.from_environment("trainer-agent"), tuple(sys.argv[1:]), 2))
"""


def agent(*actions: str) -> dict[str, object]:
    """The real agent with two stub ranks."""
    name = "trainer-${local_rank}"
    rank = [sys.executable, "-I", "-S", str(HERE / "stub_role.py"), name, f"become|{name}", "beat"]
    argv = [sys.executable, "-c", AGENT, *rank, *(actions or ("forever",))]
    members = ("trainer-0", "trainer-1")
    return {"name": "trainer-agent", "argv": argv, "environment": {}, "needs": ("engine-0",), "members": members} | {
        "start_deadline_s": 60.0
    }


def test_ranks_that_end_well(stub_run):
    run = stub_run(engine(), agent("say|step=1", "exit|0"))
    ended = run.end()
    assert ended.code == 0
    assert ended.out.endswith("step=1\n")
    assert "trainer-1 | step=1" in ended.err


@pytest.mark.parametrize("victim", ["trainer-0", "trainer-1"])
def test_a_rank_that_is_killed(stub_run, victim):
    run = stub_run(engine(), agent("say|here", "forever"))
    assert run.pid("trainer-0") != run.pid("trainer-1")
    run.kill(victim)
    ended = run.end()
    assert ended.code == 3
    assert f"polyturn: error: {victim} was killed by signal 9" in ended.err
    assert ended.err.endswith("  here\n")


def test_a_rank_that_is_killed_while_the_other_takes_no_request(stub_run):
    """The agent alone would wait for half a minute before it says anything."""
    run = stub_run(engine(), agent("ignore|SIGTERM", "forever"), stop_grace_s=1.0)
    assert run.pid("trainer-0") != run.pid("trainer-1")
    run.kill("trainer-1")
    eventually(lambda: (run.folder.roles / "trainer-1.ended").exists(), "the note of the death")
    ended = run.end()
    assert ended.code == 3
    assert "polyturn: error: trainer-1 was killed by signal 9" in ended.err


def test_a_rank_that_is_stopped(stub_run):
    run = stub_run(engine(), agent("wait|rank 0 in all_reduce|600", "forever"), silence_s=2.0)
    assert run.pid("trainer-0") != run.pid("trainer-1")
    time.sleep(0.5)
    run.kill("trainer-1", signal.SIGSTOP)
    ended = run.end()
    assert ended.code == 3
    assert "polyturn: error: trainer-1 hangs: no heartbeat for " in ended.err
    assert "its process is stopped; it had waited " in ended.err
    assert " s for rank 0 in all_reduce, with a deadline of 600 s" in ended.err


def test_an_agent_that_is_killed(stub_run):
    run = stub_run(engine(), agent("ignore|SIGTERM", "daemon", "forever"))
    assert run.pid("trainer-0") != run.pid("trainer-1")
    run.kill("trainer-agent")
    ended = run.end()
    assert ended.code == 3
    assert "polyturn: error: trainer-agent was killed by signal 9" in ended.err


@pytest.mark.parametrize("how", ["once", "twice"])
def test_ctrl_c(stub_run, how):
    """The stub's other rank does not know of it, so the driver's code is what ends the agent."""
    answer = "on|SIGINT|saved|130" if how == "once" else "ignore|SIGINT"
    run = stub_run(engine(), agent(answer, "say|up", "forever"))
    assert run.pid("trainer-0") != run.pid("trainer-1")
    eventually(lambda: "up" in run.log("trainer-0"), "the ranks' start")
    os.kill(run.process.pid, signal.SIGINT)
    if how == "twice":
        eventually(lambda: "is asked to save" in run.err, "the answer to the first")
        os.kill(run.process.pid, signal.SIGINT)
    ended = run.end()
    assert ended.code == 130
    assert run.log("trainer-0").endswith("saved\n") == (how == "once")


def test_kill_9_of_the_supervisor(stub_run):
    run = stub_run(engine(), agent("ignore|SIGTERM", "forever"))
    assert run.pid("trainer-0") != run.pid("trainer-1")
    os.kill(run.supervisor, signal.SIGKILL)
    assert run.end().code == 3
