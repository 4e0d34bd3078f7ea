"""Starting a process whose output goes to a file, in a session of its own."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def start_process(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `argv` with exactly `environment`; what it writes to stdout and stderr is appended to `log`.

    It leads a session and a process group of its own: a Ctrl-C at the terminal doesn't reach it, and `os.killpg` with its
    process id reaches all that it starts and that doesn't leave. Raises OSError when it can't be started.
    """
    # Appending is what lets several processes write to one file without writing over each other's lines.
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
        )
    finally:
        os.close(output)


def redirect_output(log: Path) -> None:
    """Append all that this process writes to stdout and stderr from now on to `log`, also from native code."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on at the moment. Whoever can should rather listen on port 0 and ask."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
