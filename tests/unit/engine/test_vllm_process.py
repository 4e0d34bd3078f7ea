"""A vLLM server as a child: with a stand-in for vLLM's module, so that what is tested is the starting, watching and ending."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import polyturn
from polyturn.engine.vllm_process import VllmProcess
from polyturn.errors import DeadlineError, EngineError
from polyturn.processes.descendants import process
from polyturn.processes.starting import free_port

STAND_IN = """
import http.server, os, signal, subprocess, sys, time
port, label, model, how = int(sys.argv[1]), os.environ["LABEL"], sys.argv[2], sys.argv[3]
worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"])
open(os.environ["PIDS"], "a").write(f"{os.getpid()} {worker.pid}\\n")
print(f"loading {model} as {label}", flush=True)
if how == "dies":
    print("there is no such model", flush=True)
    sys.exit(7)
if how == "never":
    time.sleep(3600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    monkeypatch.setattr("polyturn.engine.vllm_process.GRACE_S", 0.4)
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(STAND_IN)
    made = []

    def make(how="serves", deadline_s=60.0) -> VllmProcess:
        port = free_port()
        source = str(Path(polyturn.__file__).parents[1])
        variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{source}", "PIDS": str(tmp_path / "pids")}
        made.append(
            VllmProcess(
                f"http://127.0.0.1:{port}",
                command=lambda model: [str(port), str(model), how],
                environment=lambda label: {**variables, "LABEL": label},
                log=tmp_path / "logs" / "vllm.log",
                start_deadline_s=deadline_s,
            )
        )
        return made[-1]

    yield make
    for one in made:
        asyncio.run(one.stop())


def pids(tmp_path) -> list[int]:
    """All that were ever started: servers and their workers."""
    return [int(word) for word in (tmp_path / "pids").read_text().split()]


def alive(tmp_path) -> list[int]:
    found = [process(pid) for pid in pids(tmp_path)]
    return [one.pid for one in found if one is not None and not one.ended]


async def until(condition) -> None:
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never came")


async def test_it_is_started_restarted_and_ended_with_its_workers(child, tmp_path):
    one = child()
    await one.start(Path("/first"), "default")
    assert one.alive
    assert len(alive(tmp_path)) == 2
    await one.stop()
    await one.stop()
    assert not one.alive
    assert alive(tmp_path) == [], "the worker ignores SIGTERM, and is killed"
    await one.start(Path("/second"), "3")
    assert len(alive(tmp_path)) == 2
    await one.stop()
    assert alive(tmp_path) == []
    log = (tmp_path / "logs" / "vllm.log").read_text()
    assert "loading /first as default" in log
    assert "loading /second as 3" in log


async def test_one_that_ends_before_it_serves_shows_its_log(child, tmp_path):
    with pytest.raises(EngineError, match=r"(?s)ended with exit code 7 before it was healthy; .*\n  \| there is no such model"):
        await child("dies").start(Path("/m"), "default")
    assert alive(tmp_path) == []


async def test_one_that_never_serves_is_ended_at_its_deadline(child, tmp_path):
    with pytest.raises(
        DeadlineError, match=r"(?s)1\.5 s for the vLLM server at http.*to be healthy \(engine\.start_deadline_s\)"
    ):
        await child("never", deadline_s=1.5).start(Path("/m"), "default")
    assert alive(tmp_path) == []


async def test_one_that_is_killed_is_noticed(child):
    one = child()
    await one.start(Path("/m"), "default")
    os.kill(one.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"was killed by signal 9 \(SIGKILL.* while it served"):
        await asyncio.wait_for(one.ended(), 30)
    await one.stop()


async def test_it_does_not_outlive_its_starter(child, tmp_path):
    """The starter is killed and can end nobody: the kernel tells the server."""
    one = child()
    argv, variables = one._command(Path("/m")), one._environment("default")
    script = (
        "import os, subprocess, sys, time\n"
        f"environment = {{**{dict(variables)!r}, 'POLYTURN_PARENT_PID': str(os.getpid())}}\n"
        f"argv = [sys.executable, '-m', 'polyturn.engine.vllm_child', *{argv!r}]\n"
        "subprocess.Popen(argv, env=environment, start_new_session=True)\n"
        "time.sleep(3600)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script])  # noqa: ASYNC220 - it is killed, not awaited
    await until(lambda: (tmp_path / "pids").exists() and len(pids(tmp_path)) == 2)
    server, worker = pids(tmp_path)
    starter.kill()
    starter.wait(30)
    await until(lambda: server not in alive(tmp_path))
    os.kill(worker, signal.SIGKILL)  # vLLM's own workers watch their parent; this one does not
