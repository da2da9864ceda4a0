"""The client against hand-written servers: framing, early answers, reuse, failures."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aenv.http.client import ConnectError, Connection, ConnectionLostError
from aenv.http.head import ProtocolError
from aenv.http.message import HttpError, Request, Response, UpgradeResponse
from aenv.http.stream import Stream, bridge
from tests.http.support import run, serving

HOST = [("Host", "guest")]
Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def connect(port: int) -> Connection:
    sock = socket.socket()
    sock.setblocking(False)
    return await Connection.open(sock, ("127.0.0.1", port), timeout=5)


@asynccontextmanager
async def against(peer: Peer) -> AsyncIterator[Connection]:
    """A connection to a server that is `peer`."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await peer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    connection = await connect(server.sockets[0].getsockname()[1])
    try:
        yield connection
    finally:
        connection.abort()
        server.close()


def answering(*pieces: bytes) -> Peer:
    """A server that answers the first request with these pieces, and closes."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)

    return peer


@pytest.mark.parametrize(
    ("pieces", "body", "reusable"),
    [
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",), b"abc", True),
        ((b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 3\r\n\r", b"\na", b"bc"), b"abc", True),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
          b"2\r\nab\r\n1", b"\r\nc\r\n0\r\nT: x\r\n\r\n"), b"abc", True),
        ((b"HTTP/1.1 200 OK\r\n\r\nab", b"c"), b"abc", False),
        ((b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc",), b"abc", False),
        ((b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc",), b"abc", False),
        ((b"HTTP/1.1 200 OK\n\nabc",), b"abc", False),
        ((b"HTTP/1.1 200 OK\nContent-Length: 3\n", b"\nabc"), b"abc", True),
        ((b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n",), b"", True),
        ((b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",), b"", True),
        ((b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 ",
          b"200 OK\r\nContent-Length: 3\r\n\r\nabc"), b"abc", True),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\n",), b"abc", False),
    ],
)  # fmt: skip
def test_framing(both: Any, pieces: tuple[bytes, ...], body: bytes, reusable: bool) -> None:
    async def main() -> None:
        done = asyncio.Event()

        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await answering(*pieces)(reader, writer)
            if reusable:
                await done.wait()

        async with against(peer) as connection:
            response = await connection.request("GET", "/", HOST)
            assert response.status in (200, 204)
            assert await response.read() == body
            assert connection.reusable is reusable
            done.set()

    both(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: \0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 200_000,
        b"HTTP/1.1 102 Processing\r\n\r\n" * 100,
    ],
)
def test_nonsense_is_a_protocol_error(answer: bytes) -> None:
    async def main() -> None:
        async with against(answering(answer)) as connection:
            with pytest.raises(ProtocolError):
                await (await connection.request("GET", "/", HOST)).read()
            assert connection.closed

    run(main())


@pytest.mark.parametrize(
    ("answer", "answered"),
    [
        (b"", False),
        (b"HTTP/1.1 20", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", True),
    ],
)
def test_a_cut_answer_is_a_lost_connection(both: Any, answer: bytes, answered: bool) -> None:
    async def main() -> None:
        async with against(answering(answer)) as connection:
            with pytest.raises(ConnectionLostError) as caught:
                await (await connection.request("GET", "/", HOST)).read()
            assert caught.value.answered is answered
            assert connection.closed
            with pytest.raises(ConnectionLostError):
                await connection.request("GET", "/", HOST)

    both(main())


def test_reuse_and_head(both: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            connection = await connect(server.port)
            for n in range(3):
                response = await connection.request("POST", f"/{n}", HOST, b"body")
                assert await response.read() == b"POST /%d body" % n
            response = await connection.request("HEAD", "/", HOST)
            assert (response.headers.get("content-length"), await response.read()) == ("7", b"")
            assert connection.reusable
            connection.close()

    both(main())


def test_an_idle_connection_that_gets_data_or_eof_is_closed(both: Any) -> None:
    async def main() -> None:
        for more in (b"HTTP/1.1 408 Timeout\r\n\r\n", b""):
            go = asyncio.Event()

            async def peer(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, more: bytes = more, go: asyncio.Event = go
            ) -> None:
                await answering(b"HTTP/1.1 204 No Content\r\n\r\n")(reader, writer)
                await go.wait()
                writer.write(more)

            async with against(peer) as connection:
                await connection.request("GET", "/", HOST)
                assert connection.reusable
                go.set()
                while not connection.closed:
                    await asyncio.sleep(0.001)
                assert not connection.reusable

    both(main())


def test_body_from_an_iterator_is_streamed_while_the_answer_comes(both: Any) -> None:
    async def handler(request: Request) -> Response:
        return Response(200, request.stream())

    async def main() -> None:
        queue: asyncio.Queue[bytes] = asyncio.Queue()

        async def lines() -> AsyncIterator[bytes]:
            while line := await queue.get():
                yield line

        async with serving(handler) as server:
            connection = await connect(server.port)
            response = await connection.request("POST", "/", HOST, lines())
            for line in (b"one", b"two"):
                queue.put_nowait(line)
                assert await anext(response.body) == line
            queue.put_nowait(b"")
            assert await response.read() == b""
            assert connection.reusable
            connection.close()

    both(main())


@pytest.mark.parametrize("length", [2, 50])
def test_body_of_the_wrong_length_is_never_passed_off_as_whole(length: int) -> None:
    async def ten() -> AsyncIterator[bytes]:
        yield b"0123456789"

    async def main() -> None:
        async with serving() as server:
            connection = await connect(server.port)
            with pytest.raises(ValueError, match="request body is"):
                await connection.request("POST", "/", HOST, ten(), length=length)
            assert connection.closed

    run(main())


def test_failing_body_fails_the_request() -> None:
    async def bad() -> AsyncIterator[bytes]:
        yield b"x"
        raise HttpError(400, "client nonsense")

    async def main() -> None:
        async with serving() as server:
            connection = await connect(server.port)
            with pytest.raises(HttpError, match="client nonsense"):
                await connection.request("POST", "/", HOST, bad())
            assert connection.closed

    run(main())


def test_early_answer_ends_the_upload() -> None:
    async def handler(request: Request) -> Response:
        raise HttpError(401, "no")

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(10_000)
            await asyncio.sleep(0)

    async def main() -> None:
        async with serving(handler) as server:
            connection = await connect(server.port)
            response = await connection.request("POST", "/", HOST, endless())
            assert response.status == 401
            assert b"no" in await response.read()
            assert not connection.reusable

    run(main())


def test_cancelled_request_closes() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def main() -> None:
        async with against(peer) as connection:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await connection.request("GET", "/", HOST)
            assert connection.closed

    run(main())


def test_slow_reader_holds_the_server_back() -> None:
    async def main() -> None:
        sent = 0

        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n")
            for _ in range(500):
                writer.write(bytes(100_000))
                await writer.drain()
                sent += 100_000

        async with against(peer) as connection:
            response = await connection.request("GET", "/", HOST)
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert sent < 30_000_000
            assert response.body.buffered < 2 << 20
            assert sum([len(piece) async for piece in response.body]) == 50_000_000
            assert connection.reusable

    run(main())


def test_refused_and_timed_out_connects() -> None:
    async def main() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            with pytest.raises(ConnectError) as caught:
                await connect(bound.getsockname()[1])
            assert isinstance(caught.value.__cause__, ConnectionRefusedError)

    run(main())


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("GET", "/ HTTP/1.1\r\nX: y", HOST),
        ("GET /", "/", HOST),
        ("GET", "/", [("A", "b\r\nC: d")]),
        ("GET", "/", [("A: b\r\nC", "d")]),
    ],
)
def test_request_splitting_is_refused(method: str, target: str, headers: list[tuple[str, str]]) -> None:
    async def main() -> None:
        async with serving() as server:
            connection = await connect(server.port)
            with pytest.raises(ValueError, match=r"invalid|control"):
                await connection.request(method, target, headers)
            assert connection.reusable  # nothing was sent
            connection.close()

    run(main())


def test_upgrade_and_restart_over_a_relay(both: Any) -> None:
    """A server that relays to another by 101: raw bytes, or HTTP again on the same connection."""

    async def main() -> None:
        async with serving() as inner:

            async def handler(request: Request) -> Response:
                async def relay(stream: Stream) -> None:
                    back = await connect(inner.port)
                    await bridge(stream, Stream(back._transport))

                return UpgradeResponse([], relay)

            upgrade = [*HOST, ("Connection", "Upgrade"), ("Upgrade", "relay")]
            async with serving(handler) as outer:
                connection = await connect(outer.port)
                assert (await connection.request("GET", "/", upgrade)).status == 101
                assert not connection.reusable
                connection.restart()
                for n in range(2):
                    response = await connection.request("POST", f"/{n}", HOST, b"x")
                    assert await response.read() == b"POST /%d x" % n
                connection.close()

                connection = await connect(outer.port)
                await connection.request("GET", "/", upgrade)
                stream = connection.detach()
                stream.write(b"GET /raw HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                got = b""
                while data := await stream.read():
                    got += data
                assert got.endswith(b"GET /raw ")
                stream.close()
                with pytest.raises(ConnectionLostError):
                    connection.restart()

    both(main())
