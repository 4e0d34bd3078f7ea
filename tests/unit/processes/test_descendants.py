"""Everybody below a process is found and ended, wherever they went. In a process of its own: it ends all that it has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S
from polyturn.processes.descendants import HAS_PROC, Process, descendants, process, send

SOURCE = str(Path(__file__).parents[3] / "src")
pytestmark = pytest.mark.skipif(not HAS_PROC, reason="no /proc here")


def run(code: str) -> str:
    """What a child prints that may do with its family what it likes."""
    head = "import os, signal, subprocess, sys, time\nfrom polyturn.processes.descendants import *\n"
    head += "from polyturn.processes.parents import become_subreaper\n"
    argv = [sys.executable, "-c", head + textwrap.dedent(code)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | {"PYTHONPATH": SOURCE})
    assert done.returncode == 0, done.stderr
    return done.stdout


SLEEPER = """
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
def up(**how):
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", DEAF], stdout=subprocess.PIPE, **how)
    child.stdout.readline()
    return child
def daemon():
    ready, done = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(done, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    os.wait()
    return int(os.read(ready, 20))
"""


def test_whoever_left_is_still_found_and_ended():
    code = SLEEPER + textwrap.dedent("""
        become_subreaper()
        child, gone = up(start_new_session=True), daemon()
        found = {member.pid: member.parent for member in descendants()}
        assert found == {child.pid: os.getpid(), gone: os.getpid()}, found
        print(end_descendants(grace_s=0.05, limit_s=30.0), descendants())
        """)
    assert run(code) == "[] []\n"


def test_whoever_is_asked_and_ends_is_not_killed():
    code = """
        polite = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'done'), os._exit(0)))"
        argv = [sys.executable, "-I", "-S", "-c", polite + "; print(flush=True); time.sleep(600)"]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
        assert end_descendants(grace_s=30.0, limit_s=60.0) == []
        print(child.stdout.read(), end="")
        """
    assert run(code) == "done"


def test_those_who_start_others_meanwhile_do_not_get_away():
    code = """
        become_subreaper()
        forks = "import os, time\\nwhile True:\\n    os.fork() or time.sleep(0.05) or os._exit(0)\\n    time.sleep(0.02)"
        for _ in range(3):
            subprocess.Popen([sys.executable, "-I", "-S", "-c", forks])
        time.sleep(0.1)
        print(end_descendants(grace_s=0.0, limit_s=60.0))
        """
    assert run(code) == "[]\n"


def test_the_dead_that_were_handed_over_are_collected_and_own_children_are_not():
    code = """
        become_subreaper()
        own = subprocess.Popen([sys.executable, "-I", "-S", "-c", "raise SystemExit(7)"])
        child = os.fork()
        if child == 0:
            if os.fork() == 0:
                time.sleep(0.1)
            os._exit(0)
        os.waitpid(child, 0)
        while not all(member.ended for member in descendants()):
            time.sleep(0.01)
        assert len(descendants()) == 2
        collect_orphans(own={own.pid})
        assert [member.pid for member in descendants()] == [own.pid]
        print(own.wait())
        """
    assert run(code) == "7\n"


def test_a_signal_never_hits_a_later_process_of_the_same_number():
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    try:
        found = process(child.pid)
        assert found is not None
        assert (found.parent, found.ended) == (os.getpid(), False)
        assert (found.pid, found.started) in [(member.pid, member.started) for member in descendants()]
        send(Process(found.pid, found.parent, found.state, found.started - 1), signal.SIGKILL)
        assert child.poll() is None
        send(found, signal.SIGKILL)
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
        send(found, signal.SIGKILL)
        assert process(child.pid) is None
    finally:
        child.kill()
        child.wait()
