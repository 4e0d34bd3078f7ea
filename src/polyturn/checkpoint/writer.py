"""The process that writes checkpoints, so that hashing and compressing never take the interpreter from the trainer.

    driver ── settings, then jobs, each with the memory when it is new ──> writer
           <── what became of them ──

It ends when the driver has closed its end of the socket or died, after the jobs that it has, which lie whole in its memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from typing import Any

from polyturn.processes.leaving import leave

_LENGTH_BYTES = 8
_NICE = 5


def send(connection: socket.socket, message: Any, descriptor: int | None = None) -> None:
    """Send one JSON message, and a descriptor with it. Raises OSError when the other end is gone."""
    content = json.dumps(message, allow_nan=False).encode()
    head = len(content).to_bytes(_LENGTH_BYTES, "big")
    socket.send_fds(connection, [head], [] if descriptor is None else [descriptor])
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[Any, int | None] | None:
    """The next message, and the descriptor that came with it; None when the other end is closed. Raises OSError."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 1)
    head += _exactly(connection, _LENGTH_BYTES - len(head)) if head else b""
    if len(head) < _LENGTH_BYTES:
        return None
    content = _exactly(connection, length := int.from_bytes(head, "big"))
    if len(content) < length:
        return None
    return json.loads(content), descriptors[0] if descriptors else None


def main() -> None:
    """Serve the socket whose descriptor is the first argument."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends by itself, and soon
    connection = socket.socket(fileno=int(sys.argv[1]))

    import torch

    from polyturn.checkpoint.arena import map_memory
    from polyturn.checkpoint.writing import CheckpointWriter, Job, Settings

    torch.set_num_threads(1)
    speaking = threading.Lock()

    def tell(event: dict[str, Any]) -> None:
        with speaking, contextlib.suppress(OSError):  # nobody listens any more
            send(connection, event)

    first = receive(connection)
    if first is None:
        return
    os.nice(_NICE)  # not before: starting is what the first checkpoint waits for
    writer = CheckpointWriter(Settings.from_json(first[0]), tell)
    memory = torch.empty(0, dtype=torch.uint8)
    while (message := receive(connection)) is not None:
        job, descriptor = message
        if descriptor is not None:
            memory = map_memory(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        writer.write(Job.from_json(job), memory)
    writer.close()


def _exactly(connection: socket.socket, count: int) -> bytes:
    """That many bytes, or fewer when the other end is closed."""
    parts = []
    while count > 0:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
    leave(0)
