"""Tools of a real MCP server, over its standard input and over HTTP. Needs the package `mcp`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parts import mcp_server_path
from polyturn.environments.base import Reply
from polyturn.environments.builtin.tools import Tools
from polyturn.environments.contract import check_contract
from polyturn.environments.tools.mcp import McpServer
from polyturn.environments.tools.toolbox import Limits, Toolbox
from polyturn.errors import DeadlineError, EnvironmentSetupError, ResourceError
from polyturn.loop.tasks import tasks_from_file
from polyturn.rendering.tool_calls import ToolCall, call_format
from polyturn.types import Message, Row

pytestmark = pytest.mark.real
WRITE = call_format("hermes").write


def command(*words):
    return {"command": [sys.executable, str(mcp_server_path.PATH), *words]}


def called(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def http_server(port):
    process = subprocess.Popen([*command(str(port))["command"]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def shop_url():
    port = free_port()
    with http_server(port):
        yield f"http://127.0.0.1:{port}/mcp"


@pytest.fixture(params=["stdio", "http"])
def settings(request):
    return command() if request.param == "stdio" else {"url": request.getfixturevalue("shop_url")}


@contextlib.asynccontextmanager
async def running(settings, **limits):
    server = McpServer(settings)
    box = Toolbox(server.tools(), Limits(**limits))
    await server.start()
    try:
        yield server, box
    finally:
        await server.stop()


def alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


async def gone(pid):
    for _ in range(100):
        if not alive(pid):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_calls_and_their_results(settings):
    async with running(settings, call_deadline_s=1.0) as (server, box):
        assert [spec.name for spec in box.specs] == ["add", "put", "weigh", "pid", "slow", "picture", "die"]
        assert box.specs[0].description == "Add two numbers."
        connection = await server.current(None)
        calls = [called("add", a=1, b=2), called("add", a="x"), called("put", item="moon"), called("picture"), called("slow")]
        answered = await box.answer([*calls, called("add", a=7)], connection)
        assert answered.texts == [
            "3",
            "error: the argument a of add: 'x' is not of type 'integer'",
            answered.texts[2],
            "[image image/png]\na lamp",
            "error: slow did not end within 1 s",
            "7",
        ]
        assert answered.texts[2].startswith("error: ")
        assert "there is no moon" in answered.texts[2]
        assert answered.counts == {"calls": 6, "malformed": 1, "tool_error": 1, "tool_timeout": 1}


@pytest.mark.parametrize("item", ["\ud800", float("nan"), float("inf")])
async def test_what_can_not_be_sent_costs_the_call_and_not_the_connection(item, settings):
    name, argument = ("put", "item") if isinstance(item, str) else ("weigh", "kilos")
    async with running(settings) as (server, box):
        connection = await server.current(None)
        answered = await box.answer([called(name, **{argument: item}), called("add", a=1)], connection)
        assert answered.texts[0].startswith("error: ")
        assert answered.texts[1] == "1"
        assert answered.counts == {"calls": 2, "tool_error": 1}
        assert await server.current(connection) is connection


async def test_only_the_tools_that_are_allowed(settings):
    async with running({**settings, "allow": ["put", "add"]}) as (_, box):
        assert [spec.name for spec in box.specs] == ["put", "add"]
    with pytest.raises(EnvironmentSetupError, match="has no tool 'putt'; did you mean put"):
        McpServer({**settings, "allow": ["putt"]}).tools()


async def test_a_connection_each_is_a_state_each(settings):
    async with running({**settings, "session": "per_trajectory"}) as (server, box):
        one, other = await server.current(None), await server.current(None)
        assert one is not other
        assert await server.current(one) is one
        if "url" not in settings:
            first = (await box.answer([called("put", item="lamp"), called("pid")], one)).texts
            second = (await box.answer([called("put", item="chair"), called("pid")], other)).texts
            assert (first[0], second[0]) == ("lamp", "chair")
            await server.release(one)
            assert await gone(first[1])
            assert alive(second[1])
    if "url" not in settings:
        assert await gone(second[1]), "stop closes what its trajectories left open"


async def test_a_server_that_dies_is_a_fault_and_is_started_again_once():
    async with running(command()) as (server, box):
        first = await server.current(None)
        with pytest.raises(ResourceError, match=r"die failed: .*; it wrote '.*the roof fell in'"):
            await box.answer([called("die")], first)
        second = await server.current(first)
        assert second is not first
        assert (await box.answer([called("add", a=1)], second)).texts == ["1"]
        with pytest.raises(ResourceError):
            await box.answer([called("die")], second)
        with pytest.raises(ResourceError, match="lost a second time"):
            await server.current(second)


async def test_a_server_at_a_url_that_dies_is_a_fault():
    port = free_port()
    with http_server(port):
        async with running({"url": f"http://127.0.0.1:{port}/mcp"}) as (server, box):
            connection = await server.current(None)
            with pytest.raises(ResourceError, match="die failed"):
                await box.answer([called("die")], connection)
            with pytest.raises(ResourceError, match="can't be used"):
                await server.current(connection)


@pytest.mark.parametrize("words", [(), ("stubborn",)], ids=["willing", "stubborn"])
async def test_no_process_is_left_behind(words):
    async with running(command(*words)) as (server, box):
        pid = (await box.answer([called("pid")], await server.current(None))).texts[0]
        assert alive(pid)
    assert await gone(pid)


@pytest.mark.parametrize("stopped", [True, False], ids=["with stop", "without stop"])
def test_no_process_is_left_behind_by_a_run_that_is_cancelled(stopped):
    pids, running_call = [], asyncio.Event()

    async def run():
        server = McpServer(command())
        box = Toolbox(server.tools(), Limits())
        await server.start()
        try:
            connection = await server.current(None)
            pids.append((await box.answer([called("pid")], connection)).texts[0])
            running_call.set()
            await box.answer([called("slow")], connection)
        finally:
            if stopped:
                await server.stop()

    async def cancelled():
        task = asyncio.create_task(run())
        await asyncio.wait_for(running_call.wait(), 30)
        await asyncio.sleep(0.05)
        assert alive(pids[0])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert asyncio.run(gone(pids[0]))


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"command": ["/no/such/program"]}, ResourceError, "can't be used: FileNotFoundError"),
        ({"command": [sys.executable, "-c", "raise SystemExit('no key')"]}, ResourceError, "it wrote 'no key'"),
        ({"url": "http://127.0.0.1:9/mcp"}, ResourceError, "can't be used"),
        (
            {"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_deadline_s": 0.5},
            DeadlineError,
            "to answer",
        ),
    ],
    ids=["missing", "dies", "nobody there", "silent"],
)
def test_servers_that_can_not_be_used(settings, error, said):
    with pytest.raises(error, match=said):
        McpServer(settings).tools()


async def test_a_list_of_tools_that_changes_is_refused(monkeypatch):
    server = McpServer(command())
    server.tools()
    object.__setattr__(server.settings, "command", (*server.settings.command, "late"))
    with pytest.raises(EnvironmentSetupError, match="lists other tools than a moment ago"):
        await server.start()


async def test_the_environment_keeps_its_contract(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "2 + 3?", "answer": "5", "calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}\n')
    environment = Tools(mcp=command(), exact=True)
    report = await check_contract(environment, rows=tasks_from_file(str(path), environment))
    await environment.stop()
    assert report.failed == []
    assert [message.content for message in report.shown.transcript if message.role == "tool"] == ["5"]


async def test_a_lost_server_is_a_fault_of_one_step_of_the_environment():
    environment = Tools(mcp=command(), exact=True)
    row = Row(where="a:1", format="question/answer", messages=(Message(role="user", content="2 + 3?"),), answer="5")
    task = environment.task_from_example(row)
    await environment.start()
    try:
        one, other = await environment.setup(task), await environment.setup(task)
        with pytest.raises(ResourceError):
            await environment.step(one, Reply(text=WRITE("die", {})))
        result = await environment.step(other, Reply(text=WRITE("add", {"a": 5})))
        assert [message.content for message in result.messages] == ["5"], "the others go on with the new connection"
        for state in (one, other):
            await environment.close(state)
    finally:
        await environment.stop()
