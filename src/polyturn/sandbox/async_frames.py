"""The driver's way to send and receive `frames`. Apart from them, since programs' processes must stay small."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from polyturn.sandbox import frames
from polyturn.sandbox.frames import LENGTH


async def send(stream: socket.socket, data: bytes) -> None:
    """Send a message over a socket that does not block. That nobody is there to read it is for others to notice."""
    with contextlib.suppress(ConnectionError):
        await asyncio.get_running_loop().sock_sendall(stream, frames.pack(data))


async def receive(stream: socket.socket, limit: int) -> bytes | None:
    """The next message of a socket that does not block, None when the other side is gone. Raises FrameError as `receive`."""
    head = await receive_exactly(stream, LENGTH.size)
    if head is None:
        return None
    (size,) = LENGTH.unpack(head)
    if size > limit:
        raise frames.FrameError(f"a message of {size} bytes, the limit is {limit}")
    return await receive_exactly(stream, size)


async def receive_exactly(stream: socket.socket, size: int) -> bytes | None:
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
