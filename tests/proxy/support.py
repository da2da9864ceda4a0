"""A proxy in front of stand-in guests: real servers on loopback, reached by a port map."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from aenv.http.client import ClientResponse, Connection
from aenv.http.message import Handler, Request, Response, UpgradeResponse
from aenv.http.server import Server
from aenv.http.stream import Stream, bridge
from aenv.proxy.forward import Proxy, ProxyLimits
from aenv.proxy.target import ENVD_PORT, SandboxNotFoundError, Target
from tests.http.support import Raw


async def control(request: Request) -> Response:
    return Response(200, b"control plane")


class Guest:
    """One sandbox: `ports` maps guest ports to ports of this host, `loopback` those that only dial reaches."""

    def __init__(self, **fields: Any) -> None:
        self.ports: dict[int, int] = {}
        self.loopback: dict[int, int] = {}
        self.connects: list[int] = []
        self.asked = 0
        self.open: set[object] = set()  # exchanges that are not over
        self.traffic_token: str | None = fields.pop("traffic_token", None)
        self.fields = fields
        self.target = self.incarnate("1")

    def incarnate(self, name: str) -> Target:
        self.target = Target("iabc", name, self.connect, asyncio.get_running_loop().create_future(), **self.fields)
        return self.target

    def exchange(self) -> Target:
        """Its target, for one request."""
        key = object()
        self.open.add(key)
        self.asked += 1
        return replace(self.target, ended=lambda: self.open.discard(key))

    def kill(self) -> None:
        self.target.closed.set_result(None)

    async def connect(self, port: int) -> socket.socket:
        self.connects.append(port)
        if port not in self.ports:
            raise ConnectionRefusedError(111, "Connection refused")
        return await connected(self.ports[port])

    async def agent(self, request: Request) -> Response:
        """Stands in for envd: health, echo of what arrived, and dial."""
        if request.path != "/dial":
            return await reflect(request)
        assert request.upgrade == "aenv-dial"
        if request.headers.get("x-access-token") != self.fields.get("envd_token"):
            return Response.error(401, "unauthorized")
        port = int(request.query_one("port") or "0")
        if port not in self.loopback:
            return Response.error(502, "refused")
        sock = await connected(self.loopback[port])
        back = await Connection.open(sock)

        async def relay(stream: Stream) -> None:
            await bridge(stream, Stream(back._transport))

        return UpgradeResponse([("Upgrade", "aenv-dial")], relay)


class Table:
    """The resolver."""

    def __init__(self) -> None:
        self.guests: dict[str, Guest] = {}
        self.asked: list[tuple[str, int, str, bool]] = []
        self.error: Exception | None = None

    def traffic_token(self, sandbox_id: str) -> str | None:
        return self.guests[sandbox_id].traffic_token if sandbox_id in self.guests else None

    async def resolve(self, sandbox_id: str, port: int, request_path: str, envd: bool) -> Target:
        self.asked.append((sandbox_id, port, request_path, envd))
        if self.error is not None:
            raise self.error
        guest = self.guests.get(sandbox_id)
        if guest is None or guest.target.closed.done():
            raise SandboxNotFoundError
        return guest.exchange()


async def connected(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except BaseException:
        sock.close()
        raise
    return sock


async def reflect(request: Request) -> Response:
    """Tell what arrived."""
    body = await request.read(1 << 20)
    return Response.json(
        200,
        {
            "method": request.method,
            "target": request.target,
            "headers": [list(item) for item in request.headers],
            "body": body.decode("latin-1"),
        },
    )


class World:
    """A node with its proxy, one guest `iabc`, and clients."""

    def __init__(self, stack: AsyncExitStack, table: Table, guest: Guest, proxy: Proxy, server: Server) -> None:
        self._stack = stack
        self.table = table
        self.guest = guest
        self.proxy = proxy
        self.server = server

    async def serve(self, handler: Handler) -> int:
        server = await Server.start(handler)
        self._stack.push_async_callback(server.close, 0.2)
        return server.port

    async def serve_raw(self, peer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> int:
        async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await peer(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(guarded, "127.0.0.1", 0)
        self._stack.callback(server.close)
        port: int = server.sockets[0].getsockname()[1]
        return port

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[Raw]:
        async with Raw.open(self.server.port) as raw:
            yield raw

    async def ask(
        self, method: str = "GET", target: str = "/", *headers: tuple[str, str], body: Any = None, port: int = 80
    ) -> ClientResponse:
        """One request on a connection of its own; the whole answer has arrived."""
        connection = await Connection.open(await connected(self.server.port))
        self._stack.callback(connection.abort)
        given = {name.lower() for name, _ in headers}
        fields = [("Host", f"{port}-iabc.e2b.test")] if "host" not in given else []
        return await connection.request(method, target, [*fields, *headers], body)


@asynccontextmanager
async def world(limits: ProxyLimits | None = None, **fields: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        table = Table()
        guest = table.guests["iabc"] = Guest(**fields)
        stack.callback(_all_ended, table)
        proxy = Proxy(table, domain="e2b.test", limits=limits)
        stack.callback(proxy.close)
        server = await Server.start(proxy.handler(control))
        stack.push_async_callback(server.close, 0.2)
        made = World(stack, table, guest, proxy, server)
        guest.ports[ENVD_PORT] = await made.serve(guest.agent)
        guest.ports[80] = await made.serve(reflect)
        yield made


def _all_ended(table: Table) -> None:
    """When all is closed, every exchange has been told to be over."""
    assert [guest.open for guest in table.guests.values() if guest.open] == []
