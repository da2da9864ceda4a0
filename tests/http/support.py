"""Servers, raw clients and loop runners for the HTTP tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvloop

from aenv.http.message import Handler, Request, Response
from aenv.http.server import Limits, Server

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


def run(main: Awaitable[T]) -> T:
    """Run under uvloop, with a bound on the time."""

    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await main

    return uvloop.run(bounded())


def run_asyncio(main: Awaitable[T]) -> T:
    """Run under asyncio's own loop."""

    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await main

    return asyncio.run(bounded())


async def echo(request: Request) -> Response:
    """Answer with what was received."""
    body = await request.read(1 << 20)
    head = f"{request.method} {request.target} {body.decode('latin-1')}"
    return Response(200, head.encode("latin-1"))


@asynccontextmanager
async def serving(handler: Handler = echo, **limits: Any) -> AsyncIterator[Server]:
    server = await Server.start(handler, limits=Limits(**limits))
    try:
        yield server
    finally:
        await server.close(grace=1)
        assert not server.connections


class Raw:
    """A client that sends and receives plain bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @asynccontextmanager
    async def open(cls, port: int) -> AsyncIterator[Raw]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One response with a Content-Length or chunked body: status, lower-case fields, body."""
        status, fields = await self.head()
        if fields.get("transfer-encoding") == "chunked":
            return status, fields, b"".join([piece async for piece in self.chunks()])
        return status, fields, await self.reader.readexactly(int(fields.get("content-length", "0")))

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:-2])}
        return int(lines[0].split(" ")[1]), fields

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"

    async def ends(self) -> bytes:
        """All that comes until the server closes."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""


async def exchange(port: int, data: bytes) -> bytes:
    """Send bytes, return all that comes until the server closes."""
    async with Raw.open(port) as raw:
        await raw.send(data)
        return await raw.ends()
