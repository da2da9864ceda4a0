"""The server over real sockets: order, framing, limits, time-outs, closing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aenv.http.message import ClientDisconnectedError, HttpError, Request, Response, UpgradeResponse
from aenv.http.server import Server
from aenv.http.stream import Stream, StreamClosedError
from tests.http.support import Raw, echo, exchange, run, serving

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


def test_keep_alive_and_close(both: Any) -> None:
    async def main() -> None:
        async with serving() as server, Raw.open(server.port) as raw:
            for _ in range(3):
                await raw.send(GET)
                assert (await raw.answer())[2] == b"GET /a "
            await raw.send(b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            status, fields, body = await raw.answer()
            assert (status, fields["connection"], body) == (200, "close", b"GET /last ")
            assert await raw.ends() == b""

    both(main())


def test_pipelined_requests_are_answered_in_order(both: Any) -> None:
    async def handler(request: Request) -> Response:
        if request.path == "/0":
            await asyncio.sleep(0.02)
        return Response(200, request.path.encode() + await request.read(100))

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            body = b"4\r\nabcd\r\n0\r\nTrailer: x\r\n\r\n"
            chunked = b"POST /%d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body
            await raw.send(b"".join(chunked % n for n in range(200)))
            for n in range(200):
                assert (await raw.answer())[2] == b"/%dabcd" % n

    both(main())


def test_pipelined_flood_does_not_pile_up() -> None:
    gate = asyncio.Event()

    async def handler(request: Request) -> Response:
        await gate.wait()
        return Response(204)

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            raw.writer.write(GET * 400_000)  # 10 MiB and more than any socket buffers
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert max(len(c._buffer) for c in server.connections) < 1 << 20
            raw.writer.transport.abort()
            gate.set()

    run(main())


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
def test_any_segmentation_gives_the_same_requests(both: Any, cut: int) -> None:
    data = (
        b"POST /p?q=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
        b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;ext=1\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n"
    )

    async def main() -> None:
        async with serving() as server, Raw.open(server.port) as raw:
            for at in range(0, len(data), cut):
                await raw.send(data[at : at + cut])
                await asyncio.sleep(0)
            assert (await raw.answer())[2] == b"POST /p?q=1 hello"
            assert (await raw.answer())[2] == b"POST /c abc0123456789"

    both(main())


def test_expect_continue_is_sent_when_the_handler_reads(both: Any) -> None:
    async def main() -> None:
        async with serving() as server, Raw.open(server.port) as raw:
            await raw.send(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
            assert await raw.head() == (100, {})
            await raw.send(b"ok")
            assert (await raw.answer())[2] == b"PUT / ok"

    both(main())


def test_expect_continue_is_not_sent_when_the_handler_refuses(both: Any) -> None:
    async def handler(request: Request) -> Response:
        raise HttpError(401, "no")

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            await raw.send(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
            status, fields, body = await raw.answer()
            assert (status, fields["connection"]) == (401, "close")
            assert json.loads(body) == {"code": 401, "message": "no"}
            assert await raw.ends() == b""

    both(main())


def test_body_already_sent_gets_no_continue() -> None:
    async def main() -> None:
        async with serving() as server, Raw.open(server.port) as raw:
            await raw.send(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\nok")
            assert (await raw.answer())[2] == b"PUT / ok"

    run(main())


def test_head_has_the_length_but_no_body(both: Any) -> None:
    async def main() -> None:
        async with serving() as server, Raw.open(server.port) as raw:
            await raw.send(b"HEAD /h HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
            status, fields = await raw.head()
            assert (status, fields) == (200, {"content-length": "8"})
            assert (await raw.answer())[2] == b"GET /a "

    both(main())


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_body_have_no_framing(status: int) -> None:
    async def handler(request: Request) -> Response:
        return Response(status, b"never sent")

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            await raw.send(GET + GET)
            assert await raw.head() == (status, {})
            assert await raw.head() == (status, {})

    run(main())


def test_http_1_0(both: Any) -> None:
    async def handler(request: Request) -> Response:
        return Response(200, pieces() if request.path == "/s" else b"x")

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    async def main() -> None:
        async with serving(handler) as server:
            assert await exchange(server.port, b"GET / HTTP/1.0\r\n\r\n") == (
                b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx"
            )
            assert (await exchange(server.port, b"GET /s HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\nonetwo")
            async with Raw.open(server.port) as raw:
                await raw.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2)
                assert (await raw.answer())[1]["connection"] == "keep-alive"
                await raw.answer()

    both(main())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02", 400),  # a TLS hello
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\rc\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /#f HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET ftp://a/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: dinner\r\n\r\n", 417),
        (b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n", 501),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", 501),
        (b"GET / HTTP/3.1\r\nHost: x\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 505),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /" + b"a" * 40000, 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40000, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000, 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * 4000, 400),
    ],
)
def test_bad_requests_are_refused_and_the_connection_closed(data: bytes, status: int) -> None:
    async def main() -> None:
        async with serving(linger_timeout=0.2) as server, Raw.open(server.port) as raw:
            await raw.send(data)
            got, fields, body = await raw.answer()
            assert got == status
            assert json.loads(body)["code"] == status
            assert fields["content-type"] == "application/json"
            await raw.send(GET)  # what follows is never taken for a request
            assert await raw.ends() == b""

    run(main())


def test_refused_upload_still_sees_the_answer(both: Any) -> None:
    async def handler(request: Request) -> Response:
        raise HttpError(401, "no")

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            raw.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n" + b"x" * 4_000_000)
            assert (await raw.answer())[0] == 401

    both(main())


def test_unread_small_body_keeps_the_connection(both: Any) -> None:
    async def handler(request: Request) -> Response:
        return Response(200, request.path.encode())

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            await raw.send(b"POST /1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
            assert (await raw.answer())[2] == b"/1"
            await raw.send(b"0\r\n\r\n" + GET)
            assert (await raw.answer())[2] == b"/a"

    both(main())


def test_slow_head_gets_408_and_idle_connections_are_closed() -> None:
    async def main() -> None:
        async with serving(head_timeout=0.1, idle_timeout=0.3, linger_timeout=0.1) as server:
            async with Raw.open(server.port) as raw:
                await raw.send(b"GET / HTTP/1.1\r\nHos")
                assert (await raw.answer())[0] == 408
                assert await raw.ends() == b""
            assert await exchange(server.port, b"") == b""
            async with Raw.open(server.port) as raw:
                await raw.send(GET)
                await raw.answer()
                assert await raw.ends() == b""

    run(main())


def test_slow_trickle_does_not_extend_the_time_of_a_head() -> None:
    async def main() -> None:
        async with serving(head_timeout=0.3, linger_timeout=0.1) as server, Raw.open(server.port) as raw:
            feeder = asyncio.ensure_future(trickle(raw))
            assert (await raw.answer())[0] == 408
            feeder.cancel()

    async def trickle(raw: Raw) -> None:
        for byte in b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1000:
            raw.writer.write(bytes([byte]))
            await asyncio.sleep(0.01)

    run(main())


def test_slow_body_gets_408() -> None:
    async def handler(request: Request) -> Response:
        return Response(200, await request.read(100, timeout=0.05))

    async def main() -> None:
        async with serving(handler, linger_timeout=0.1) as server, Raw.open(server.port) as raw:
            await raw.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
            assert (await raw.answer())[0] == 408
            assert await raw.ends() == b""

    run(main())


def test_pieces_of_a_stream_are_sent_one_by_one(both: Any) -> None:
    async def main() -> None:
        queue: asyncio.Queue[bytes] = asyncio.Queue()

        async def lines() -> AsyncIterator[bytes]:
            while line := await queue.get():
                yield line

        async def handler(request: Request) -> Response:
            return Response(200, lines())

        async with serving(handler) as server, Raw.open(server.port) as raw:
            await raw.send(GET)
            assert (await raw.head())[1] == {"transfer-encoding": "chunked"}
            chunks = raw.chunks()
            for n in range(3):
                queue.put_nowait(b"line %d\n" % n)
                assert await anext(chunks) == b"line %d\n" % n
            queue.put_nowait(b"")
            assert [c async for c in chunks] == []

    both(main())


def test_stream_stops_when_the_client_goes(both: Any) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def forever() -> AsyncIterator[bytes]:
            try:
                yield b"first"
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def handler(request: Request) -> Response:
            return Response(200, forever())

        for how in ("close", "abort"):
            ended.clear()
            async with serving(handler) as server, Raw.open(server.port) as raw:
                await raw.send(GET)
                await raw.reader.readuntil(b"first")
                raw.writer.close() if how == "close" else raw.writer.transport.abort()
                await ended.wait()

    both(main())


def test_handler_learns_that_the_client_is_gone(both: Any) -> None:
    async def main() -> None:
        gone = asyncio.Event()
        failure: list[BaseException] = []

        async def handler(request: Request) -> Response:
            request.on_disconnect(gone.set)
            try:
                await request.read(100)
            except ClientDisconnectedError as error:
                failure.append(error)
                raise
            return Response(204)

        async with serving(handler) as server:
            async with Raw.open(server.port) as raw:
                await raw.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
                while not server.connections or next(iter(server.connections))._request is None:
                    await asyncio.sleep(0.001)
            await gone.wait()
        assert len(failure) == 1

    both(main())


def test_half_closed_client_still_gets_its_answer(both: Any) -> None:
    async def handler(request: Request) -> Response:
        await asyncio.sleep(0.02)
        return Response(200, b"late")

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            await raw.send(GET)
            raw.writer.write_eof()
            assert (await raw.ends()).endswith(b"late")

    both(main())


def test_slow_reader_holds_the_stream_back() -> None:
    async def main() -> None:
        made = 0

        async def much() -> AsyncIterator[bytes]:
            nonlocal made
            for _ in range(1000):
                made += 1
                yield bytes(100_000)

        async def handler(request: Request) -> Response:
            return Response(200, much(), [("Content-Length", "100000000")])

        async with serving(handler) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1000)
            writer.write(GET)
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert made < 300  # socket buffers hold some megabytes
            writer.transport.abort()

    run(main())


def test_slow_handler_holds_the_upload_back() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def handler(request: Request) -> Response:
            await go.wait()
            return Response(200, str(sum([len(piece) async for piece in request.stream()])).encode())

        async with serving(handler) as server, Raw.open(server.port) as raw:
            raw.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n" + bytes(30_000_000))
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert all(c._body.buffered < 2 << 20 for c in server.connections if c._body is not None)
            go.set()
            assert (await raw.answer())[2] == b"30000000"

    run(main())


@pytest.mark.parametrize(
    "headers",
    [
        [("A", "b\r\nSet-Cookie: x")],
        [("A", "b\nc")],
        [("A\r\nB", "c")],
        [("A b", "c")],
        [("A", "\0")],
        [("A", "\u20ac")],
    ],
)
def test_response_splitting_is_refused(headers: list[tuple[str, str]]) -> None:
    async def handler(request: Request) -> Response:
        return Response(200, b"x", headers)

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            await raw.send(GET)
            assert (await raw.answer())[0] == 500

    run(main())


def test_failing_handler_gives_500_and_keeps_the_connection() -> None:
    async def handler(request: Request) -> Response:
        raise RuntimeError("secret detail")

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            for _ in range(2):
                await raw.send(GET)
                status, _, body = await raw.answer()
                assert (status, json.loads(body)) == (500, {"code": 500, "message": "internal error"})

    run(main())


@pytest.mark.parametrize("length", ["2", "50"])
def test_stream_of_the_wrong_length_breaks_off(length: str) -> None:
    async def ten() -> AsyncIterator[bytes]:
        yield b"0123456789"

    async def handler(request: Request) -> Response:
        return Response(200, ten(), [("Content-Length", length)])

    async def main() -> None:
        async with serving(handler) as server:
            data = await exchange(server.port, GET + GET)
            assert data.count(b"HTTP/1.1") <= 1

    run(main())


def test_upgrade_gives_a_raw_stream_with_half_close(both: Any) -> None:
    async def handler(request: Request) -> Response:
        assert request.upgrade == "raw"
        return UpgradeResponse([("Upgrade", "raw")], upper)

    async def upper(stream: Stream) -> None:
        total = b""
        while data := await stream.read():
            total += data
        stream.write(total.upper())
        await stream.drain()

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            await raw.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: raw\r\n\r\nearly ")
            assert await raw.head() == (101, {"upgrade": "raw", "connection": "Upgrade"})
            await raw.send(b"late")
            raw.writer.write_eof()
            assert await raw.ends() == b"EARLY LATE"

    both(main())


def test_upgrade_nobody_asked_for_is_a_500() -> None:
    async def handler(request: Request) -> Response:
        return UpgradeResponse([], never)

    async def never(stream: Stream) -> None:
        raise AssertionError

    async def main() -> None:
        async with serving(handler) as server, Raw.open(server.port) as raw:
            await raw.send(GET)
            assert (await raw.answer())[0] == 500

    run(main())


def test_offered_upgrade_with_a_body_is_an_ordinary_request() -> None:
    async def main() -> None:
        async with serving() as server, Raw.open(server.port) as raw:
            head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n"
            await raw.send(head + b"ab" + GET)
            assert (await raw.answer())[2] == b"POST / ab"
            assert (await raw.answer())[2] == b"GET /a "

    run(main())


def test_broken_stream_raises() -> None:
    async def main() -> None:
        result: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        async def handler(request: Request) -> Response:
            return UpgradeResponse([], use)

        async def use(stream: Stream) -> None:
            try:
                while await stream.read():
                    pass
                stream.abort()
                await stream.wait_ended()
                stream.write(b"x")
            except StreamClosedError as error:
                result.set_result(error)

        async with serving(handler) as server, Raw.open(server.port) as raw:
            await raw.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: raw\r\n\r\n")
            await raw.head()
            raw.writer.close()
            await result

    run(main())


def test_close_finishes_running_requests_and_drops_late_ones(both: Any) -> None:
    async def handler(request: Request) -> Response:
        await asyncio.sleep(0.05 if request.path == "/short" else 1000)
        return Response(200, b"done")

    async def main() -> None:
        server = await Server.start(handler)
        async with Raw.open(server.port) as idle, Raw.open(server.port) as short, Raw.open(server.port) as long:
            await short.send(b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n")
            await long.send(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
            while sum(c.working is not None for c in server.connections) < 2:
                await asyncio.sleep(0.001)
            port = server.port
            await server.close(grace=0.3)
            assert await idle.ends() == b""
            assert (await short.ends()).endswith(b"done")
            assert await long.ends() == b""
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
        assert not server.connections

    both(main())


def test_opened_and_dropped_connections_leave_nothing() -> None:
    async def main() -> None:
        async with serving() as server:
            parts = (b"", b"GET / HT", GET, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1")
            before = len(os.listdir("/proc/self/fd"))
            for n in range(10_000):
                with socket.create_connection(("127.0.0.1", server.port)) as sock:
                    sock.send(parts[n % 4])
                await asyncio.sleep(0)
            while server.connections:
                await asyncio.sleep(0.01)
            assert len(os.listdir("/proc/self/fd")) == before

    run(main())


def test_too_many_connections_get_503() -> None:
    async def main() -> None:
        async with serving(max_connections=2, linger_timeout=0.1) as server:
            async with Raw.open(server.port) as a, Raw.open(server.port) as b:
                await a.send(GET)
                await b.send(GET)
                await a.answer()
                await b.answer()
                async with Raw.open(server.port) as c:
                    assert (await c.answer())[0] == 503
            while server.connections:
                await asyncio.sleep(0.01)
            async with Raw.open(server.port) as d:
                await d.send(GET)
                assert (await d.answer())[0] == 200

    run(main())


def test_small_answer_is_one_write() -> None:
    """Head and body must not be two segments: the second would wait for nothing, but costs a system call."""

    class Recorder:
        def __init__(self) -> None:
            self.writes: list[bytes] = []

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: None

        def write(self, data: bytes) -> None:
            self.writes.append(data)

        def is_closing(self) -> bool:
            return False

    async def main() -> None:
        from aenv.http.server import Limits, _Connection

        server = Server(echo, Limits())
        connection = _Connection(server)
        recorder: Any = Recorder()
        connection.connection_made(recorder)
        connection.data_received(GET)
        task = connection.working
        assert task is not None
        await task
        assert len(recorder.writes) == 1
        await server.close(grace=0)

    run(main())
