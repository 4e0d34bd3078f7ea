"""The keeper: what it hands on, and what it does when its child ends. Whole runs are in `launch/test_supervisor.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S
from parts.stub_runs import eventually, runs
from polyturn.processes.keeper import keep

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from polyturn.processes.keeper import keep, remove_scratch
print(os.getpid(), flush=True)
code = keep()
if code is not None:
    sys.exit(code)
print(os.getpid(), os.environ["TMPDIR"], flush=True)
"""


class Kept:
    """A kept process that runs `code`."""

    def __init__(self, code, **how):
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
        self.keeper = subprocess.Popen(
            [sys.executable, "-c", HEAD + code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            **how,
        )
        self.keeper.stdout.readline()
        child, self.scratch = self.keeper.stdout.readline().split()
        self.child = int(child)

    def end(self):
        out, err = self.keeper.stdout.read(), self.keeper.stderr.read()
        self.keeper.wait(PATIENCE_S)
        self.close()
        eventually(lambda: not runs(self.child), "the end of the child")
        assert not Path(self.scratch).exists()
        return self.keeper.returncode, out, err

    def close(self):
        self.keeper.stdout.close()
        self.keeper.stderr.close()


def test_the_childs_exit_code_is_the_keepers():
    kept = Kept("import tempfile; tempfile.mkstemp(); sys.exit(4)")
    assert kept.end() == (4, "", "")


def test_signals_are_handed_on_once_each_and_a_hang_up_as_a_request_to_end():
    kept = Kept("""
for name in ("SIGINT", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda number, frame: print(signal.Signals(number).name, flush=True))
print("ready", flush=True)
while True:
    signal.pause()
""")
    kept.keeper.stdout.readline()
    for number, name in [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGTERM")]:
        kept.keeper.send_signal(number)
        assert kept.keeper.stdout.readline() == f"{name}\n"
    os.kill(kept.child, signal.SIGKILL)
    code, out, err = kept.end()
    assert (code, out) == (3, "")
    assert err.startswith("polyturn: error: the supervisor of the run was killed by signal 9 (SIGKILL")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_child_that_ends_of_what_was_handed_on(number, code):
    reset = f"signal.signal({int(number)}, signal.SIG_DFL); print('ready', flush=True); time.sleep(600)"
    kept = Kept(reset)
    kept.keeper.stdout.readline()
    kept.keeper.send_signal(number)
    assert kept.end() == (code, "", "")


def test_a_terminals_ctrl_c_reaches_the_keeper_only():
    """The child has a session of its own, so what the terminal sends to the keeper's group does not come twice."""
    kept = Kept("print(os.getsid(0) == os.getpid(), flush=True); time.sleep(600)", start_new_session=True)
    assert kept.keeper.stdout.readline() == "True\n"
    os.killpg(kept.keeper.pid, signal.SIGTERM)
    assert kept.end()[0] == 143


def test_signals_that_the_shell_of_a_script_ignores_work_in_the_child():
    def ignored():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    kept = Kept("print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)", preexec_fn=ignored)
    assert kept.end() == (0, "True\n", "")


def test_without_a_keeper_the_child_is_told_and_cleans_up_itself():
    kept = Kept("""
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
print("ready", flush=True)
try:
    time.sleep(600)
finally:
    time.sleep(0.1)
    remove_scratch()
""")
    kept.keeper.stdout.readline()
    kept.keeper.kill()
    kept.keeper.wait()
    eventually(lambda: not Path(kept.scratch).exists(), "the removal of temporary files")
    eventually(lambda: not runs(kept.child), "the end of the child")
    kept.close()


def test_the_keeper_is_killed_before_the_child_is_ready():
    """The child's own answer to a request to end is not in place yet."""
    kept = Kept("print('ready', flush=True); time.sleep(600)")
    kept.keeper.stdout.readline()
    kept.keeper.kill()
    kept.keeper.wait()
    eventually(lambda: not runs(kept.child), "the end of the child")
    assert not Path(kept.scratch).exists()
    kept.close()


def test_a_process_with_threads_is_not_forked():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="threads"):
            keep()
    finally:
        stop.set()
        thread.join()
