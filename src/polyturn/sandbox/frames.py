"""Messages with their length in front, over a socket. Whoever reads says how much it is ready to take."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

_LENGTH = struct.Struct("!Q")


class FrameError(Exception):
    """A message that is longer than its reader takes."""


def pack(data: bytes) -> bytes:
    """A message as it goes over the socket."""
    return _LENGTH.pack(len(data)) + data


def receive(stream: socket.socket, limit: int) -> bytes | None:
    """The next message of a blocking socket, None when the other side is gone.

    Raises:
        FrameError: it is longer than `limit` bytes.
        TimeoutError: the socket's timeout passed.
    """
    head = _receive_exactly(stream, _LENGTH.size)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > limit:
        raise FrameError(f"a message of {size} bytes, the limit is {limit}")
    return _receive_exactly(stream, size)


async def send_async(stream: socket.socket, data: bytes) -> None:
    """Send a message over a socket that does not block. That nobody is there to read it is for others to notice."""
    with contextlib.suppress(ConnectionError):
        await asyncio.get_running_loop().sock_sendall(stream, pack(data))


async def receive_async(stream: socket.socket, limit: int) -> bytes | None:
    """The next message of a socket that does not block, None when the other side is gone. Raises FrameError as `receive`."""
    head = await receive_exactly_async(stream, _LENGTH.size)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > limit:
        raise FrameError(f"a message of {size} bytes, the limit is {limit}")
    return await receive_exactly_async(stream, size)


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


async def receive_exactly_async(stream: socket.socket, size: int) -> bytes | None:
    """`size` bytes of a socket that does not block, None when the other side is gone before."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        try:
            part = await loop.sock_recv(stream, min(size - len(data), 1 << 16))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
