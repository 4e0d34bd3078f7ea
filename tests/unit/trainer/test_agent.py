"""torchrun's elastic agent with real ranks over gloo: it starts them, says how each ended, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S
from parts.runs import child_environment
from parts.stub_runs import eventually, runs
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.endings import read_ending
from polyturn.trainer.agent import _say_failure

pytestmark = pytest.mark.real

AGENT = """
import sys
from pathlib import Path
from polyturn.processes.role import Role
from polyturn.trainer import agent
agent._LOOK_S = float(sys.argv[3])
role = Role(name="trainer-agent", folder=Path(sys.argv[1]))
sys.exit(agent.run_agent(role, (sys.executable, "-c", sys.argv[2], "trainer-${local_rank}"), 2))
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
from polyturn.processes.parents import die_with_starter
die_with_starter()
import torch
import torch.distributed as dist
from polyturn.processes.leaving import leave
assert sys.argv[1] == "trainer-" + os.environ["RANK"]
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
folder = Path(os.environ["FOLDER"])
(folder / f"{dist.get_rank()}.txt").write_text(f"{total.item()} {os.environ['MASTER_ADDR']} {os.getpid()}")
"""
# A rank ends by `leave`, as those of a run do: at the usual end of a process gloo's threads sometimes abort it.
WAITS = RANK + "dist.barrier() if dist.get_rank() else time.sleep(600)"


class Agent:
    def __init__(self, folder: Path, rank: str, *, look_s: float = 0.1) -> None:
        self.folder = RunFolder.create(folder, "run").root
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        more = {"FOLDER": str(folder), "TMPDIR": str(self.temporary), "GLOO_SOCKET_IFNAME": "lo"}
        self.said = [folder / f"{number}.txt" for number in range(2)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(self.folder), rank, str(look_s)],
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(**more),
        )

    def pids(self) -> list[int]:
        eventually(
            lambda: all(path.exists() and path.read_text().count(" ") == 2 for path in self.said), "the meeting of the ranks"
        )
        return [int(path.read_text().split()[2]) for path in self.said]

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=PATIENCE_S)
        for path in self.said:
            if path.exists():
                eventually(lambda path=path: not runs(int(path.read_text().split()[2])), "the end of a rank")
        assert list(self.temporary.iterdir()) == []
        return self.process.returncode, err

    def endings(self) -> list[int | None]:
        return [read_ending(self.folder, f"trainer-{rank}") for rank in range(2)]


def test_ranks_meet_on_the_loopback_device(tmp_path):
    agent = Agent(tmp_path, RANK + "time.sleep(1); leave(0)")
    pids = agent.pids()
    sockets = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if open_to_all(line)}
    sockets |= {line.split()[9] for line in Path("/proc/net/tcp6").read_text().splitlines()[1:] if open_to_all(line)}
    for pid in [agent.process.pid, *pids]:
        held = {str(entry.readlink()).removeprefix("socket:[").rstrip("]") for entry in Path(f"/proc/{pid}/fd").iterdir()}
        assert not held & sockets, "it listens to more than this machine"
    assert agent.end()[0] == 0
    assert [path.read_text().split()[:2] for path in agent.said] == [["3.0", "127.0.0.1"]] * 2
    assert agent.endings() == [0, 0]


@pytest.mark.parametrize(("last", "codes", "code"), [("leave(0)", [0, 0], 0), ("leave(dist.get_rank() * 5)", [None, 5], 5)])
def test_how_ranks_ended_is_known_also_when_the_agent_collects_them_first(tmp_path, last, codes, code):
    agent = Agent(tmp_path, RANK + last, look_s=600)
    ended, err = agent.end()
    assert ended == code, err
    found = agent.endings()
    assert [one for one, wanted in zip(found, codes, strict=True) if wanted is not None] == [c for c in codes if c is not None]


def open_to_all(line: str) -> bool:
    """Whether a line of /proc/net/tcp is of a socket that listens on all devices."""
    address, state = line.split()[1], line.split()[3]
    return state == "0A" and set(address.split(":")[0]) == {"0"}


def test_a_rank_that_is_killed_is_named_at_once(tmp_path):
    agent = Agent(
        tmp_path,
        WAITS.replace(
            "time.sleep(600)", "(signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), os._exit(0))), time.sleep(600))"
        ),
    )
    os.kill(agent.pids()[1], signal.SIGKILL)
    eventually(lambda: agent.endings()[1] == -9, "the note of the death")
    assert agent.process.poll() is None, "it is written before the others have ended"
    code, err = agent.end()
    assert code == 3
    assert "trainer-1 was killed by signal 9" in err


def test_the_exit_code_of_the_rank_that_failed_first(tmp_path):
    loses_its_peer = "\ntry: dist.barrier()\nexcept RuntimeError: leave(3)"
    agent = Agent(tmp_path, RANK + "if dist.get_rank(): leave(4)" + loses_its_peer)
    code, err = agent.end()
    assert code == 4, err
    assert "trainer-1 ended with exit code 4; the other ranks have been ended" in err
    assert agent.endings()[1] == 4


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ({0: -signal.SIGABRT, 1: 4}, 1),
        ({0: 3, 1: -signal.SIGABRT}, 1),
        ({0: -signal.SIGTERM, 1: 3}, 1),
        ({0: 1, 1: -signal.SIGKILL}, 1),
        ({0: 3, 1: 1}, 1),
        ({1: 4, 0: 1}, 1),
        ({0: 0, 1: 3}, 1),
    ],
    ids=str,
)
def test_the_rank_that_the_others_ended_of(codes, first, capsys):
    """Whoever loses a peer over gloo is aborted by its threads, ends with 3 or is asked to end."""
    assert _say_failure(Path(), codes) == (codes[first] if codes[first] > 0 else 3)
    assert capsys.readouterr().err.startswith(f"trainer-{first} ")


def test_a_request_to_end_ends_the_ranks(tmp_path):
    agent = Agent(tmp_path, WAITS)
    agent.pids()
    agent.process.terminate()
    assert agent.end()[0] == 143


def test_ranks_do_not_outlive_the_agent(tmp_path):
    agent = Agent(tmp_path, WAITS)
    agent.pids()
    agent.process.kill()
    assert agent.end()[0] == -signal.SIGKILL
