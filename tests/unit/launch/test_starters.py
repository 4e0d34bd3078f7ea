"""The supervisor with a starter that starts no process: what Ray or a cloud's job would be."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from polyturn.errors import ResourceError
from polyturn.launch.specs import RoleSpec
from polyturn.launch.supervisor import Patience, Supervisor
from polyturn.metrics.run_folder import RunFolder
from polyturn.processes.role import address_file

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
        if not spec.members:
            text = json.dumps({"address": f"http://{spec.name}", "pid": 1})
            address_file(self.folder, spec.name).write_text(text)
        return self.roles[spec.name]


def spec(name, *needs, members=()):
    return RoleSpec(name=name, argv=(), environment={}, start_deadline_s=30.0, needs=needs, members=members)


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
