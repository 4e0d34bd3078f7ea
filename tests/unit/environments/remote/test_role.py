"""The role `environment-N` in processes of its own: started, shown, killed, stopped, stuck."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from parts.environment_processes import TOKEN, connected, processes, until
from parts.environments import Colours
from parts.playable import TASK, Sleepy
from polyturn.environments.base import Reply
from polyturn.environments.remote import RemoteEnvironment, serve_environment
from polyturn.errors import ConfigError, ResourceError
from polyturn.processes.heartbeat import Heartbeat, read_heartbeat
from polyturn.processes.role import Role, heartbeat_file

MODULE = "parts.playable"


def beat(process):
    found = read_heartbeat(heartbeat_file(process.folder, process.name))
    return [] if found is None else [wait.what for wait in found.waits]


async def test_a_role_needs_the_runs_token(tmp_path):
    role = Role(name="environment-0", folder=tmp_path)
    with pytest.raises(ConfigError, match="environment-0 was started without the run's token"):
        await serve_environment(role, Colours(), Heartbeat(tmp_path / "beat.json", "environment-0"), loop_limit_s=60)


async def test_a_process_that_is_killed_while_it_plays(tmp_path):
    """Its trajectories are lost at once, in one sentence; those of the other process go on."""
    with processes(tmp_path, f"{MODULE}:Sleepy", loop_limits_s=(60.0, 60.0)) as (first, second):
        environment = RemoteEnvironment(Sleepy(), [first.url, second.url], token=TOKEN)
        async with connected(environment):
            states = await asyncio.gather(*(environment.setup(TASK) for _ in range(8)))
            announced = json.loads((tmp_path / "roles" / "environment-0.json").read_text())
            assert announced == {"address": first.url, "pid": first.popen.pid}
            mine = [state for state in states if state.link.name == "environment-0"]
            others = [state for state in states if state.link.name == "environment-1"]
            assert (len(mine), len(others)) == (4, 4)
            steps = [asyncio.create_task(environment.step(state, Reply(text="sleep"))) for state in mine]
            await until(lambda: "sleepy.step of task" in beat(first), "the steps to be played and shown")
            os.kill(first.popen.pid, signal.SIGKILL)
            results = await asyncio.gather(*steps, return_exceptions=True)
            assert {type(result) for result in results} == {ResourceError}
            (sentence,) = {str(result) for result in results}
            assert sentence.startswith(f"environment-0 at {first.url} is gone: ")
            for state in mine:
                await environment.close(state)
            for state in others:
                assert (await environment.step(state, Reply(text="on"))).messages[0].content == "on"
                await environment.close(state)
            assert second.popen.poll() is None
            # The end that a supervisor asks for: states are closed, exit code 0.
            left = await environment.setup(TASK)
            assert left.link.name == "environment-1"
            second.popen.send_signal(signal.SIGTERM)
            await asyncio.to_thread(second.popen.wait, 60)
            assert second.popen.returncode == 0
            assert (tmp_path / "closed").read_text() == "task\n" * 5
            with pytest.raises(ResourceError, match=r"environment-0 at .* is gone.*; environment-1 at .* is gone: it stops"):
                await environment.setup(TASK)


@pytest.mark.real
async def test_a_process_that_is_stopped_and_one_that_is_stuck(tmp_path):
    with processes(tmp_path, f"{MODULE}:Sleepy", loop_limits_s=(60.0, 3.0)) as (stopped, stuck):
        environment = RemoteEnvironment(Sleepy(), [stopped.url, stuck.url], token=TOKEN, silence_s=2.0)
        async with connected(environment):
            state, other = [await environment.setup(TASK) for _ in range(2)]
            await until(lambda: "requests, 1 trajectories open" in beat(stopped), "the heartbeat")
            os.kill(stopped.popen.pid, signal.SIGSTOP)
            try:
                # More than the buffers in between take, so that the driver can't even send.
                steps = [environment.step(state, Reply(text="x" * (1 << 20))) for _ in range(8)]
                results = await asyncio.gather(*steps, return_exceptions=True)
                assert all("environment-0" in str(result) and "said nothing for 2 s" in str(result) for result in results)
            finally:
                os.kill(stopped.popen.pid, signal.SIGCONT)
            await environment.close(other)
        await until(lambda: (tmp_path / "closed").read_text() == "task\n" * 2, "the close, once the process goes on")
        environment = RemoteEnvironment(Sleepy(), [stuck.url], token=TOKEN)
        async with connected(environment):
            # A coroutine that blocks: heartbeats go on and name it, and in the end the watchdog ends the process.
            with pytest.raises(ResourceError, match=r"environment-1 at .* is gone"):
                await environment.step(await environment.setup(TASK), Reply(text="block"))
        await asyncio.to_thread(stuck.popen.wait, 60)
        assert stuck.popen.returncode == 3
        assert "sleepy.step of task" in beat(stuck)
        said = stuck.popen.stderr.read()
        assert "the event loop has stood still for 3 s" in said
        assert "playable.py" in said
