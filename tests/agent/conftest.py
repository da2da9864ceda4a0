"""A server that answers with exactly the bytes a test wants."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pytest

from aenv.http.client import Connection

T = TypeVar("T")


def frame(message: Any, flags: int = 0) -> bytes:
    body = message if isinstance(message, bytes) else msgspec.json.encode(message)
    return struct.pack(">BI", flags, len(body)) + body


def end(message: Any = None) -> bytes:
    return frame(message or {}, 2)


@dataclass
class Guest:
    """Answers every request with `status` and `body`. With `cut` it hangs up after that many bytes of the answer."""

    status: int = 200
    body: bytes = b""
    cut: int | None = None
    pieces: int = 0  # bytes a write, 0: all at once
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:-2])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.requests.append((head[0], headers, body))
            answer = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (self.status, len(self.body)) + self.body
            answer = answer[: self.cut]
            step = self.pieces or len(answer) or 1
            for at in range(0, len(answer), step):
                writer.write(answer[at : at + step])
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def socket(self, port: int = 0) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return sock

    async def connect(self) -> Connection:
        return await Connection.open(await self.socket())

    def run(self, scenario: Callable[[], Awaitable[T]]) -> T:
        async def main() -> T:
            async with asyncio.timeout(30):
                server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
                self.port = server.sockets[0].getsockname()[1]
                try:
                    return await scenario()
                finally:
                    server.close()
                    await server.wait_closed()

        return asyncio.run(main())


@pytest.fixture
def guest() -> Guest:
    return Guest()
