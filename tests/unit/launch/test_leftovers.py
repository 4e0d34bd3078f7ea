"""What a run left behind is told from what others do on the machine at the same time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

from parts.stub_runs import MARK, StubRun, listeners

LISTENER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


def own_listeners(port: int) -> list[str]:
    return StubRun.own_listeners(SimpleNamespace(mark="this run"), port)  # type: ignore[arg-type]


def test_a_port_that_another_program_has_taken_is_no_leftover():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert [owner.cmdline.partition(":")[0] for owner in listeners(port)] == [str(os.getpid())]
        assert own_listeners(port) == []
    assert list(listeners(port)) == []
    assert own_listeners(port) == []


def test_a_process_with_the_mark_of_the_run_is():
    environment = {**os.environ, MARK: "this run"}
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        port = int(child.stdout.readline())
        (found,) = own_listeners(port)
        assert found.startswith(f"{child.pid}:")
        child.stdin.close()
