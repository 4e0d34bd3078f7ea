"""The supervisor with a starter that starts no process: what Ray or a cloud's job would be."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import pytest

from polyturn.errors import ResourceError
from polyturn.launch.specs import RoleSpec
from polyturn.launch.supervisor import Patience, Supervisor
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.endings import write_ending
from polyturn.processes.role import address_file, heartbeat_file

PATIENCE = Patience(silence_s=30.0, stop_grace_s=30.0, save_s=30.0, settle_s=0.02, look_s=0.01)


class Remote:
    """A role that is only a future."""

    pid = None

    def __init__(self, events, name):
        self._events = events
        self._name = name
        self.code = asyncio.get_running_loop().create_future()

    async def wait(self):
        return await asyncio.shield(self.code)

    def terminate(self):
        self._events.append(f"terminate {self._name}")
        self.end(-signal.SIGTERM)

    def kill(self):
        self._events.append(f"kill {self._name}")

    def end(self, code):
        if not self.code.done():
            self.code.set_result(code)


class RemoteStarter:
    def __init__(self, folder):
        self.folder = folder
        self.events = []
        self.roles = {}

    def start(self, spec, place):
        if spec.name == "engine-9":
            raise ResourceError("no machine is left")
        self.events.append(f"start {spec.name} {place['POLYTURN_PEERS']} {place['POLYTURN_RUN_TOKEN']}")
        self.roles[spec.name] = Remote(self.events, spec.name)
        if not spec.members and spec.name != "engine-8":
            text = json.dumps({"address": f"http://{spec.name}", "pid": 1})
            address_file(self.folder, spec.name).write_text(text)
        return self.roles[spec.name]


def spec(name, *needs, members=(), **more):
    known = {"argv": (), "environment": {}, "start_deadline_s": 30.0}
    return RoleSpec(name=name, needs=needs, members=members, **(known | more))


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path, "run").root
    starter = RemoteStarter(folder)

    def start(*specs):
        said = []
        supervisor = Supervisor(specs, folder, starter, patience=PATIENCE, token="t", say=said.append, sweep=False)
        return supervisor.run(), starter, said

    return start


async def after(condition, act):
    while not condition():  # noqa: ASYNC110 - it asks about what others do
        await asyncio.sleep(0.001)
    act()


AGENT = spec("trainer-agent", "engine-0", members=("trainer-0",))


async def test_a_run_that_ends_well(run):
    running, starter, said = run(spec("engine-0"), AGENT)
    ends = after(lambda: "trainer-agent" in starter.roles, lambda: starter.roles["trainer-agent"].end(0))
    outcome, _ = await asyncio.gather(running, ends)
    assert (outcome.exit_code, outcome.loss) == (0, None)
    assert starter.events == [
        "start engine-0 {} t",
        'start trainer-agent {"engine": ["http://engine-0"]} t',
        "terminate engine-0",
        "kill engine-0",
    ]
    assert [line.split(" after")[0] for line in said] == ["engine-0 serves at http://engine-0"]


async def test_a_role_that_is_lost(run):
    running, starter, _ = run(spec("engine-0"), AGENT)
    ends = after(lambda: "trainer-agent" in starter.roles, lambda: starter.roles["engine-0"].end(-9))
    outcome, _ = await asyncio.gather(running, ends)
    assert (outcome.exit_code, outcome.loss.role) == (3, "engine-0")
    assert starter.events[2:] == ["terminate trainer-agent", "kill trainer-agent"]


async def test_a_role_that_can_not_be_started(run):
    running, starter, _ = run(spec("engine-0"), spec("engine-9"), AGENT)
    outcome = await running
    assert (outcome.exit_code, outcome.loss.role) == (3, "engine-9")
    assert "no machine is left" in outcome.loss.words
    assert starter.events[1:] == ["terminate engine-0", "kill engine-0"]


async def test_a_server_that_never_serves(run):
    late = spec("engine-8", start_deadline_s=0.02, deadline_key="engine.start_deadline_s")
    running, starter, _ = run(spec("engine-0"), late, spec("trainer-agent", "engine-8", members=("trainer-0",)))
    outcome = await running
    assert (outcome.exit_code, outcome.loss.role) == (3, "engine-8")
    assert outcome.loss.words == "did not serve within 0.02 s of its start (engine.start_deadline_s)"
    assert "trainer-agent" not in starter.roles


def beat(starter, role, *waits):
    """A heartbeat of a role; `waits` are (what, seconds since it began, deadline)."""
    now = time.time()
    rows = [{"what": what, "since": now - since, "deadline": now - since + limit} for what, since, limit in waits]
    text = {"role": role, "pid": os.getpid(), "host": "elsewhere", "written": now, "num_waits": len(rows), "waits": rows}
    heartbeat_file(starter.folder, role).write_text(json.dumps(text))


async def test_ranks_that_never_start(run):
    two = spec("trainer-agent", members=("trainer-0", "trainer-1"), start_deadline_s=0.1)
    running, starter, _ = run(two)
    beat(starter, "trainer-0")
    outcome = await running
    assert (outcome.exit_code, outcome.loss.role) == (3, "trainer-agent")
    assert outcome.loss.words == "did not start trainer-1 within 0.1 s"


async def test_a_wait_past_its_own_deadline(run):
    running, starter, _ = run(spec("engine-0"), AGENT)
    late = lambda: beat(starter, "trainer-0", ("rank 1 in all_reduce", 140, 120))  # noqa: E731
    outcome, _ = await asyncio.gather(running, after(lambda: "trainer-agent" in starter.roles, late))
    assert (outcome.exit_code, outcome.loss.role) == (3, "trainer-0")
    assert outcome.loss.words == "hangs: it waits for rank 1 in all_reduce, and is 20 s past its deadline of 120 s"


async def test_a_rank_that_failed_is_blamed_and_not_those_that_were_ended_with_it(run):
    running, starter, _ = run(spec("trainer-agent", members=("trainer-0", "trainer-1", "trainer-2")))

    def fail():
        for rank, code in enumerate((3, -15, -9)):
            write_ending(starter.folder, f"trainer-{rank}", code)
        starter.roles["trainer-agent"].end(3)

    outcome, _ = await asyncio.gather(running, after(lambda: "trainer-agent" in starter.roles, fail))
    assert (outcome.exit_code, outcome.loss.role) == (3, "trainer-2")
    assert outcome.loss.words.startswith("was killed by signal 9")


@pytest.mark.parametrize(("code", "exit_code", "speaks"), [(2, 2, True), (4, 4, True), (1, 3, False), (-2, 3, False)])
async def test_the_exit_code_of_an_agent_is_the_runs(run, code, exit_code, speaks):
    running, starter, _ = run(spec("trainer-agent", members=("trainer-0",)))
    ends = after(lambda: "trainer-agent" in starter.roles, lambda: starter.roles["trainer-agent"].end(code))
    outcome, _ = await asyncio.gather(running, ends)
    assert (outcome.exit_code, outcome.loss.role, outcome.loss.speaks) == (exit_code, "trainer-agent", speaks)


async def test_what_is_lost_when_the_trainer_has_ended_well_was_not_needed(run):
    running, starter, _ = run(spec("engine-0"), AGENT)

    def end():
        starter.roles["engine-0"].end(0)
        asyncio.get_running_loop().call_later(0.005, starter.roles["trainer-agent"].end, 0)

    outcome, _ = await asyncio.gather(running, after(lambda: "trainer-agent" in starter.roles, end))
    assert (outcome.exit_code, outcome.loss) == (0, None)


async def test_a_request_to_end_before_there_is_a_driver_here(run):
    running, starter, said = run(spec("engine-0"), AGENT)
    asks = after(lambda: "trainer-agent" in starter.roles, lambda: os.kill(os.getpid(), signal.SIGTERM))
    outcome, _ = await asyncio.gather(running, asks)
    assert (outcome.exit_code, outcome.loss) == (143, None)
    assert said[-1] == "SIGTERM: nothing is being trained yet; the run ends"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_everybody_is_ended_when_the_supervisor_itself_is_cancelled(run):
    running, starter, _ = run(spec("engine-0"), AGENT)
    task = asyncio.ensure_future(running)
    await after(lambda: "trainer-agent" in starter.roles, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert starter.events[2:] == ["terminate trainer-agent", "kill trainer-agent", "terminate engine-0", "kill engine-0"]
