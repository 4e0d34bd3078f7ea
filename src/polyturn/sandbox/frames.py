"""Messages with their length in front, over a socket. Whoever reads says how much it is ready to take."""

from __future__ import annotations

import socket
import struct

LENGTH = struct.Struct("!Q")
"""Of the message that follows."""


class FrameError(Exception):
    """A message that is longer than its reader takes."""


def pack(data: bytes) -> bytes:
    """A message as it goes over the socket."""
    return LENGTH.pack(len(data)) + data


def receive(stream: socket.socket, limit: int) -> bytes | None:
    """The next message of a blocking socket, None when the other side is gone.

    Raises:
        FrameError: it is longer than `limit` bytes.
        TimeoutError: the socket's timeout passed.
    """
    head = _receive_exactly(stream, LENGTH.size)
    if head is None:
        return None
    (size,) = LENGTH.unpack(head)
    if size > limit:
        raise FrameError(f"a message of {size} bytes, the limit is {limit}")
    return _receive_exactly(stream, size)


def _receive_exactly(stream: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            part = stream.recv(min(size - len(data), 1 << 16))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
