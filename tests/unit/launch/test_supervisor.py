"""Runs of stub roles: who starts when, who is blamed, and that nothing is left, however a run ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from parts.stub_runs import engine, eventually, stub, trainer

pytestmark = pytest.mark.real

TWO = ("engine-0", "environment-0")


def environment(*actions: str, **more):
    return stub("environment-0", "serve", "beat", *(actions or ("forever",)), **more)


# ── a run that ends well ───────────────────────────────────────────────────────────────────────────────────────────────


def test_roles_start_in_order_with_their_peers_and_end_silently(stub_run):
    run = stub_run(
        stub("engine-0", "sleep|0.2", "serve", "beat", "forever"),
        engine(1),
        environment(),
        trainer("peers", "say|step=1 reward=0.5", "exit|0", needs=("engine-0", "engine-1", "environment-0")),
    )
    ended = run.end()
    addresses = {
        name: json.loads((run.folder.roles / f"{name}.json").read_text())["address"] for name in ("engine-0", "engine-1")
    }
    peers = json.loads(run.log("trainer-0").splitlines()[0])
    assert ended.code == 0
    assert peers["engine"] == list(addresses.values()), "all that it needs served before the trainer started"
    assert len(peers["environment"]) == 1
    # What the driver prints looks as it does in a single process; others only say that they serve.
    assert ended.out == f"supervisor is up\n{run.log('trainer-0')}"
    lines = ended.err.splitlines()
    assert len(lines) == 3
    assert all(" serves at http://127.0.0.1:" in line for line in lines)


def test_the_log_of_each_role_and_one_of_all(stub_run):
    run = stub_run(
        engine(0, "say|loading", "error|almost", "forever"),
        trainer("say|step=1", "error|polyturn: error: no, wait", "exit|0"),
    )
    ended = run.end()
    assert run.log("engine-0") == "loading\nalmost\n"
    assert {"engine-0 | loading", "engine-0 | almost", "trainer-0 | polyturn: error: no, wait"} <= set(ended.err.splitlines())
    assert "error" not in ended.out
    together = (run.folder.logs / "all.log").read_text().splitlines()
    assert sorted(line.split(" ", 2)[2] for line in together if "serves" not in line) == [
        "engine-0 | almost",
        "engine-0 | loading",
        "trainer-0 | polyturn: error: no, wait",
        "trainer-0 | step=1",
    ]


def test_what_a_role_leaves_behind_is_ended_and_removed(stub_run):
    run = stub_run(
        engine(0, "child", "daemon", "leave_files", "say|left", "forever"),
        trainer("leave_files", "daemon", "sleep|0.2", "exit|0"),
    )
    assert run.end().code == 0


@pytest.mark.parametrize("how", ["it is ended", "it is killed"])
def test_a_segment_of_shared_memory_is_removed_and_that_of_others_is_not(stub_run, tmp_path, how):
    other = Path("/dev/shm", f"other-{tmp_path.name}-{os.getpid()}")
    run = stub_run(engine(0, "segment", "say|up", "forever"), trainer("on|SIGINT|saved|0", "forever"))
    try:
        other.write_text("x")
        run.pid("trainer-0")
        eventually(lambda: "up" in run.log("engine-0"), "the segment")
        time.sleep(0.3)  # a few looks
        if how == "it is ended":
            run.kill("trainer-0", signal.SIGINT)
        else:
            run.kill("engine-0")
        assert run.end().code == (0 if how == "it is ended" else 3)
        assert other.exists()
    finally:
        other.unlink()


# ── deaths ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_that_is_killed_is_named_with_its_last_lines(stub_run):
    run = stub_run(engine(0, *(f"say|line {number}" for number in range(20)), "forever"), environment(), trainer(needs=TWO))
    run.pid("trainer-0")
    run.kill("engine-0")
    ended = run.end()
    assert ended.code == 3
    sentence, *lines = ended.err[ended.err.index("polyturn: error") :].splitlines()
    assert sentence == (
        "polyturn: error: engine-0 was killed by signal 9 (SIGKILL; the kernel does that too, when memory runs out); the run "
        f"ends; its log: {run.folder.logs / 'engine-0.log'}"
    )
    assert lines == [f"  line {number}" for number in range(10, 20)]


def test_an_agent_that_is_killed_is_named(stub_run):
    run = stub_run(engine(), environment(), trainer(needs=TWO))
    run.kill("trainer-0", signal.SIGSEGV)  # the stub is both
    ended = run.end()
    assert ended.code == 3
    assert "polyturn: error: trainer-agent was killed by signal 11 (SIGSEGV); the run ends" in ended.err


def test_the_trainer_complains_because_its_peer_died(stub_run):
    run = stub_run(engine(0, "say|I was here", "forever"), trainer("until_gone|engine|3"))
    run.pid("trainer-0")
    run.kill("engine-0")
    ended = run.end()
    assert ended.code == 3
    last = ended.err[ended.err.rindex("polyturn: error") :]
    assert last.startswith("polyturn: error: engine-0 was killed by signal 9")
    assert "I was here" in last


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        (["say|no memory", "exit|1"], "polyturn: error: engine-0 ended with exit code 1; the run ends"),
        (["exit|0"], "polyturn: error: engine-0 ended with exit code 0 while the run needed it; the run ends"),
    ],
)
def test_a_death_before_it_serves(stub_run, actions, says):
    run = stub_run(stub("engine-0", *actions), engine(1), trainer(needs=("engine-0", "engine-1")))
    ended = run.end()
    assert ended.code == 3
    assert says in ended.err
    assert run.log("trainer-0") == "", "the trainer never started"
    assert ended.err.endswith("  no memory\n" if "say|no memory" in actions else "  (it wrote nothing)\n")


@pytest.mark.parametrize(("who", "code"), [("engine-0", 2), ("trainer-0", 4)])
def test_a_role_that_says_itself_why_it_ended_is_repeated_and_its_code_is_the_runs(stub_run, who, code):
    actions = ["error|loading", "error|polyturn: error: value, rule, fix", f"exit|{code}"]
    roles = [stub("engine-0", *actions), trainer()] if who == "engine-0" else [engine(), trainer(*actions)]
    run = stub_run(*roles)
    ended = run.end()
    assert ended.code == code
    assert ended.err.endswith(
        "polyturn: error: value, rule, fix\n" + f"polyturn: {who} ended the run; its log: {run.folder.logs / who}.log\n"
    )


# ── hanging ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_role_that_is_stopped_is_named_with_what_it_waited_for(stub_run):
    run = stub_run(engine(0, "wait|the next request|600", "forever"), trainer(), silence_s=0.5)
    run.pid("trainer-0")
    eventually(lambda: "the next request" in (run.folder.heartbeats / "engine-0.json").read_text(), "the wait")
    run.kill("engine-0", signal.SIGSTOP)
    ended = run.end()
    assert ended.code == 3
    assert "polyturn: error: engine-0 hangs: no heartbeat for " in ended.err
    assert ", its process is stopped; it had waited " in ended.err
    assert " s for the next request, with a deadline of 600 s; the run ends; its log: " in ended.err


def test_a_trainer_that_is_stopped_is_named(stub_run):
    run = stub_run(engine(), trainer(), silence_s=0.5)
    run.kill("trainer-0", signal.SIGSTOP)
    ended = run.end()
    assert ended.code == 3
    assert "polyturn: error: trainer-0 hangs: no heartbeat for " in ended.err
    assert "it waited for nothing" in ended.err


def test_a_trainer_that_gives_up_on_a_stopped_engine_is_not_to_blame(stub_run):
    run = stub_run(engine(), trainer("on|SIGUSR1|polyturn: error: no answer|3", "forever"), suspect_s=0.3)
    driver = run.pid("trainer-0")
    run.kill("engine-0", signal.SIGSTOP)
    time.sleep(0.6)
    os.kill(driver, signal.SIGUSR1)
    ended = run.end()
    assert ended.code == 3
    assert "polyturn: error: engine-0 hangs: no heartbeat for " in ended.err


def test_roles_that_ignore_requests_are_killed(stub_run):
    run = stub_run(
        engine(0, "ignore|SIGTERM", "forever"),
        environment("exit|1"),
        trainer("ignore|SIGTERM", "forever", needs=()),
        stop_grace_s=0.3,
    )
    ended = run.end()
    assert ended.code == 3
    assert "environment-0 ended with exit code 1" in ended.err


def test_roles_end_last_started_first(stub_run):
    run = stub_run(engine(0, "linger|0", "forever"), environment(), trainer("linger|0.2", "say|", "forever", needs=TWO))
    eventually(lambda: run.log("trainer-0"), "the trainer's start")
    run.kill("environment-0")
    assert run.end().code == 3
    asked, done = map(float, run.log("trainer-0").split())
    assert asked < done < float(run.log("engine-0").split()[0])


# ── whoever watches is killed ──────────────────────────────────────────────────────────────────────────────────────────


def test_kill_9_of_the_supervisor(stub_run):
    run = stub_run(engine(0, "segment", "child", "daemon", "leave_files", "forever"), trainer("ignore|SIGTERM", "forever"))
    run.pid("trainer-0")
    os.kill(run.supervisor, signal.SIGKILL)
    ended = run.end()
    assert ended.code == 3
    assert "polyturn: error: the supervisor of the run was killed by signal 9" in ended.err


def test_kill_9_of_the_keeper(stub_run):
    run = stub_run(engine(0, "child", "daemon", "leave_files", "forever"), trainer("on|SIGINT|saved|0", "say|up", "forever"))
    eventually(lambda: "up" in run.log("trainer-0"), "the trainer's start")
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    run.assert_nothing_left()
    assert run.log("trainer-0").endswith("saved\n"), "it ended in order"


def test_signals_before_anything_runs(stub_run):
    run = stub_run(stub("engine-0", "sleep|60"), trainer())
    eventually(lambda: "supervisor is up" in run.out, "the supervisor's start")
    eventually(lambda: (run.folder.logs / "engine-0.log").exists(), "the engine's start")
    os.kill(run.process.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 143
    assert "polyturn: SIGTERM: nothing is being trained yet; the run ends\n" in ended.err
    assert "error" not in ended.err


# ── Ctrl-C ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 130)])
def test_the_first_request_asks_the_driver_and_its_exit_code_is_the_runs(stub_run, number, code):
    run = stub_run(engine(), trainer(f"on|SIGINT|saved|{code}", "say|up", "forever"))
    eventually(lambda: "up" in run.log("trainer-0"), "the trainer's start")
    os.kill(run.process.pid, number)
    ended = run.end()
    assert ended.code == code
    assert ended.out.endswith("up\nsaved\n")
    name = signal.Signals(number).name
    assert f"polyturn: {name}: trainer-0 is asked to save and end; once more ends everything at once\n" in ended.err
    assert "error" not in ended.err


def test_a_driver_that_has_no_answer_to_a_request_ends_of_it(stub_run):
    run = stub_run(engine(), trainer("say|up", "forever"))
    eventually(lambda: "up" in run.log("trainer-0"), "the trainer's start")
    os.kill(run.process.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 130
    assert "error" not in ended.err


def test_the_second_request_ends_everything_at_once(stub_run):
    run = stub_run(engine(0, "ignore|SIGTERM", "forever"), trainer("ignore|SIGINT", "ignore|SIGTERM", "say|up", "forever"))
    eventually(lambda: "up" in run.log("trainer-0"), "the trainer's start")
    os.kill(run.process.pid, signal.SIGINT)
    eventually(lambda: "is asked to save" in run.err, "the answer to the first")
    os.kill(run.process.pid, signal.SIGINT)
    ended = run.end()
    assert ended.code == 130
    assert "SIGINT again: everything ends at once\n" in ended.err


def test_a_driver_that_does_not_end_when_asked(stub_run):
    run = stub_run(engine(), trainer("ignore|SIGINT", "say|up", "forever"), save_s=0.3)
    eventually(lambda: "up" in run.log("trainer-0"), "the trainer's start")
    os.kill(run.process.pid, signal.SIGINT)
    ended = run.end()
    assert ended.code == 130
    assert "polyturn: trainer-0 was asked to save and end and did not within 0.3 s; the run ends\n" in ended.err
