"""The data plane against real servers on loopback that stand in for guests."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from aenv.errors import GuestError
from aenv.http.client import ConnectionLostError
from aenv.http.message import HttpError, Request, Response, UpgradeResponse
from aenv.http.stream import Stream
from aenv.proxy.forward import ProxyLimits
from aenv.proxy.target import ENVD_PORT, ResumeDeniedError, TransitionError
from tests.http.support import run
from tests.proxy.support import Guest, World, world

GET = b"GET / HTTP/1.1\r\nHost: 80-iabc.e2b.test\r\n\r\n"


def in_world(test: Any, limits: ProxyLimits | None = None, **fields: Any) -> None:
    async def main() -> None:
        async with world(limits, **fields) as made:
            await test(made)

    run(main())


async def settled(condition: Any) -> None:
    """Wait until `condition()` holds; the test's own time-out bounds it."""
    while not condition():
        await asyncio.sleep(0.001)


def test_headers_of_a_forwarded_request() -> None:
    async def test(w: World) -> None:
        response = await w.ask(
            "POST", "/a%2Fb?x=%20",
            ("Authorization", "Basic dXNlcjo="), ("X-Access-Token", "t"), ("X-API-Key", "e2b_secret"), ("Cookie",
            "c=1"),
            ("E2b-Sandbox-Id", "iother"), ("E2b-Sandbox-Port", "1"), ("E2b-Traffic-Access-Token", "tt"),
            ("Connection", "keep-alive, X-Hop"), ("X-Hop", "1"), ("Keep-Alive", "timeout=5"), ("TE", "trailers"),
            ("Proxy-Authorization", "p"), ("X-Forwarded-For", "9.9.9.9"), ("X-Forwarded-Host", "forged"),
            ("X-Forwarded-Proto", "gopher"), ("X-Dup", "1"), ("X-Dup", "2"),
            body=b"payload",
        )  # fmt: skip
        seen = json.loads(await response.read())
        assert (seen["method"], seen["target"], seen["body"]) == ("POST", "/a%2Fb?x=%20", "payload")
        assert sorted((name.lower(), value) for name, value in seen["headers"]) == sorted(
            [
                ("authorization", "Basic dXNlcjo="), ("x-access-token", "t"), ("cookie", "c=1"),
                ("x-dup", "1"), ("x-dup", "2"), ("host", "80-iabc.e2b.test"), ("x-forwarded-host", "80-iabc.e2b.test"),
                ("x-forwarded-proto", "http"), ("x-forwarded-for", "9.9.9.9, 127.0.0.1"), ("content-length", "7"),
            ]
        )  # fmt: skip
        assert (w.guest.asked, w.guest.open) == (1, set())

    in_world(test)


def test_header_routing_and_the_control_plane() -> None:
    async def test(w: World) -> None:
        routed = ("Host", "127.0.0.1"), ("E2b-Sandbox-Id", "iabc"), ("E2b-Sandbox-Port", "80")
        assert json.loads(await (await w.ask("GET", "/r", *routed)).read())["target"] == "/r"
        for host in ("127.0.0.1", "api.e2b.test", "e2b.test"):
            assert await (await w.ask("GET", "/health", ("Host", host))).read() == b"control plane"
        assert (await w.ask("GET", "/", *routed[:2])).status == 400
        assert w.table.asked == [("iabc", 80, "/r", False)]

    in_world(test)


def test_masked_host_is_for_user_ports() -> None:
    async def test(w: World) -> None:
        for port, host in ((80, "localhost:80"), (ENVD_PORT, f"{ENVD_PORT}-iabc.e2b.test")):
            seen = json.loads(await (await w.ask("GET", "/health", port=port)).read())
            fields = dict(seen["headers"])
            assert (fields["Host"], fields["X-Forwarded-Host"]) == (host, f"{port}-iabc.e2b.test")

    in_world(test, mask_host="localhost:${PORT}")


def test_error_bodies_that_the_sdks_look_for() -> None:
    async def test(w: World) -> None:
        response = await w.ask("GET", "/", ("Host", "80-iunknown.e2b.test"))
        assert response.status == 502
        assert response.headers.get("content-type") == "application/json"
        assert json.loads(await response.read()) == {
            "sandboxId": "iunknown", "message": "The sandbox was not found", "code": 502
        }  # fmt: skip
        response = await w.ask(port=81)
        assert response.status == 502
        assert json.loads(await response.read()) == {
            "sandboxId": "iabc", "message": "The sandbox is running but port is not open", "port": 81, "code": 502
        }  # fmt: skip
        del w.guest.ports[ENVD_PORT]
        for port in (81, ENVD_PORT):
            response = await w.ask("GET", "/health", port=port)
            assert "port is not open" in json.loads(await response.read())["message"]

    in_world(test)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (TransitionError("The sandbox is pausing"), 409, "The sandbox is pausing"),
        (ResumeDeniedError("not yours"), 403, "not yours"),
        (GuestError("the guest did not answer"), 502, "the guest did not answer"),
        (HttpError(429, "slow down"), 429, "slow down"),
        (RuntimeError("bug"), 500, "internal error"),
    ],
)
def test_errors_of_the_resolver(error: Exception, status: int, message: str) -> None:
    async def test(w: World) -> None:
        w.table.error = error
        response = await w.ask()
        body = json.loads(await response.read())
        assert (response.status, body["code"], body["message"]) == (status, status, message)

    in_world(test)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/health", 200), ("/metrics", 200), ("/envs", 200), ("/files?path=/x", 200), ("/files/compose", 200),
        ("/process.Process/Start", 200), ("/filesystem.Filesystem/Stat", 200),
        ("/init", 404), ("/freeze", 404), ("/dial?port=22", 404), ("/", 404), ("/files/", 404), ("/health/", 404),
        ("//init", 404), ("/%69nit", 404), ("/process.Process/../init", 404), ("/process.Process/%2e%2e/init", 404),
        ("/Health", 404), ("/upgrade", 404), ("/filesx", 404),
    ],
)  # fmt: skip
def test_only_public_routes_of_the_agent_are_reachable(path: str, status: int) -> None:
    async def test(w: World) -> None:
        response = await w.ask("POST", path, port=ENVD_PORT)
        assert response.status == status
        assert w.guest.connects == ([ENVD_PORT] if status == 200 else [])

    in_world(test)


def test_absolute_form_does_not_get_around_the_path_rules() -> None:
    async def test(w: World) -> None:
        async with w.raw() as raw:
            host = f"{ENVD_PORT}-iabc.e2b.test".encode()
            await raw.send(b"GET http://%b/init HTTP/1.1\r\nHost: 80-iabc.e2b.test\r\n\r\n" % host)
            assert (await raw.answer())[0] == 404

    in_world(test)


def test_traffic_token_guards_user_ports_before_anything_is_woken() -> None:
    async def test(w: World) -> None:
        wrong = [[], [("E2b-Traffic-Access-Token", "x")], [("E2b-Traffic-Access-Token", "")],
                 [("e2b-traffic-access-token", "secret")] * 2, [("X-Access-Token", "secret")]]  # fmt: skip
        for headers in wrong:
            response = await w.ask("GET", "/", *headers)
            body = json.loads(await response.read())
            assert (response.status, body["code"], body["sandboxId"]) == (403, 403, "iabc")
        assert w.table.asked == []
        response = await w.ask("GET", "/", ("E2b-Traffic-Access-Token", "secret"))
        assert response.status == 200
        assert "secret" not in str(await response.read())
        assert (await w.ask("GET", "/health", port=ENVD_PORT)).status == 200

    in_world(test, traffic_token="secret")


def test_loopback_ports_are_reached_through_the_agent() -> None:
    async def test(w: World) -> None:
        w.guest.loopback[5000] = w.guest.ports[80]
        for _ in range(2):
            response = await w.ask("POST", "/x", ("Cookie", "c"), body=b"hello", port=5000)
            seen = json.loads(await response.read())
            assert (seen["target"], seen["body"]) == ("/x", "hello")
            assert "X-Access-Token" not in dict(seen["headers"])
            await settled(lambda: not any(u._busy for u in w.proxy._upstreams.values()))
        assert w.guest.connects == [5000, ENVD_PORT]  # the second request used the same connection
        w.guest.loopback[5001] = 1  # the agent's own connect fails
        assert "port is not open" in (await (await w.ask(port=5001)).read()).decode()

    in_world(test, envd_token="token of envd")


def test_connections_are_reused_and_a_stale_one_is_replaced() -> None:
    async def test(w: World) -> None:
        served = 0
        hang_up = asyncio.Event()

        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal served
            for n in (1, 2):
                await reader.readuntil(b"\r\n\r\n")
                if n == 2 and hang_up.is_set():
                    return  # the keep-alive race: the server closes as the request comes in
                served += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        w.guest.ports[80] = await w.serve_raw(peer)
        for _ in range(2):
            assert await (await w.ask()).read() == b"ok"
        assert w.guest.connects == [80]
        assert await (await w.ask()).read() == b"ok"
        hang_up.set()
        assert await (await w.ask("POST")).read() == b"ok"  # again, on a fresh connection
        assert (len(w.guest.connects), served) == (3, 4)
        response = await w.ask("POST", "/", body=b"not sent twice")
        assert response.status == 502
        assert "closed the connection" in (await response.read()).decode()
        assert served == 4

    in_world(test)


def test_connections_of_one_incarnation_are_not_used_for_the_next() -> None:
    async def test(w: World) -> None:
        for name in ("1", "2", "3"):
            assert (await w.ask()).status == 200
            assert len(w.guest.connects) == int(name)
            if name == "1":  # resumed, and the old incarnation ended
                w.guest.kill()
            w.guest.incarnate(str(int(name) + 1))

    in_world(test)


@pytest.mark.parametrize("again", [True, False])
def test_a_machine_that_ends_while_it_is_connected_to(again: bool) -> None:
    """Paused, for example, and so it will never answer: nobody waits for it. The next machine gets the request."""

    async def test(w: World) -> None:
        connect, stuck = w.guest.connect, asyncio.Event()

        async def silent(port: int) -> socket.socket:
            stuck.set()
            return await asyncio.get_running_loop().create_future()

        w.guest.connect = silent  # type: ignore[method-assign]
        w.guest.incarnate("stopped")
        asked = asyncio.ensure_future(w.ask("POST", "/", body=b"whole"))
        await stuck.wait()
        w.guest.kill()
        if again:
            w.guest.connect = connect  # type: ignore[method-assign]
            w.guest.incarnate("goes on")
        response = await asked
        told = json.loads(await response.read())
        if again:
            assert (response.status, told["body"]) == (200, "whole")
        else:
            assert (response.status, told["message"]) == (502, "The sandbox was not found")
        assert len(w.table.asked) == 2
        assert w.guest.asked == 2 - (not again)

    in_world(test)


def test_a_connection_that_comes_too_late_is_dropped() -> None:
    async def test(w: World) -> None:
        connect, stuck, made = w.guest.connect, asyncio.Event(), []

        async def stubborn(port: int) -> socket.socket:
            stuck.set()
            try:
                return await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                made.append(await connect(port))
                return made[0]

        w.guest.connect = stubborn  # type: ignore[method-assign]
        w.guest.incarnate("stopped")
        asked = asyncio.ensure_future(w.ask())
        await stuck.wait()
        w.guest.kill()
        assert (await asked).status == 502
        await settled(lambda: made and made[0].fileno() == -1)

    in_world(test)


def test_idle_connections_are_closed_and_forgotten() -> None:
    async def test(w: World) -> None:
        assert (await w.ask()).status == 200
        assert w.proxy._upstreams
        await settled(lambda: not w.proxy._upstreams)
        assert w.guest.target.closed._callbacks in (None, [])  # type: ignore[attr-defined]
        assert (await w.ask()).status == 200
        assert w.guest.connects == [80, 80]

    in_world(test, ProxyLimits(idle_timeout=0.05))


def test_a_sandbox_has_a_bound_on_connections() -> None:
    async def test(w: World) -> None:
        go = asyncio.Event()

        async def slow(request: Request) -> Response:
            await go.wait()
            return Response(204)

        w.guest.ports[81] = await w.serve(slow)
        asked = [asyncio.ensure_future(w.ask(port=81)) for _ in range(3)]
        await settled(lambda: len(w.guest.connects) == 3)
        response = await w.ask()
        assert (response.status, json.loads(await response.read())["code"]) == (429, 429)
        go.set()
        assert [(await a).status for a in asked] == [204] * 3
        assert (await w.ask()).status == 200  # an idle connection to the other port makes room

    in_world(test, ProxyLimits(max_connections=3))


def test_connect_time_out() -> None:
    async def test(w: World) -> None:
        async def never(port: int) -> Any:
            await asyncio.Event().wait()

        w.guest.connect = never  # type: ignore[method-assign]
        w.guest.incarnate("2")
        response = await w.ask()
        assert (response.status, json.loads(await response.read())["code"]) == (504, 504)
        assert next(iter(w.proxy._upstreams.values())).size == 0

    in_world(test, ProxyLimits(connect_timeout=0.05))


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 101 Why\r\nUpgrade: x\r\n\r\n", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 2", b""]
)
def test_a_server_that_does_not_speak_http_is_a_502(answer: bytes) -> None:
    async def test(w: World) -> None:
        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)

        w.guest.ports[80] = await w.serve_raw(peer)
        response = await w.ask()
        assert (response.status, json.loads(await response.read())["code"]) == (502, 502)

    in_world(test)


@pytest.mark.parametrize(
    "framing", [b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"Content-Length: 9\r\n\r\nabc"]
)
def test_a_cut_answer_is_never_passed_off_as_whole(framing: bytes) -> None:
    async def test(w: World) -> None:
        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n" + framing)
            await writer.drain()
            await asyncio.sleep(0.01)

        w.guest.ports[80] = await w.serve_raw(peer)
        with pytest.raises(ConnectionLostError):
            await (await w.ask()).read()

    in_world(test)


def test_answers_without_length_and_head_and_204() -> None:
    async def test(w: World) -> None:
        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = await reader.readuntil(b"\r\n\r\n")
            if line.startswith(b"HEAD"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n")
            elif b"/204" in line:
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\n\nuntil ")
                await writer.drain()
                await asyncio.sleep(0.01)
                writer.write(b"the end")

        w.guest.ports[80] = await w.serve_raw(peer)
        assert await (await w.ask()).read() == b"until the end"
        head = await w.ask("HEAD")
        assert (head.headers.get("content-length"), await head.read()) == ("12345", b"")
        assert (await w.ask("GET", "/204")).status == 204

    in_world(test)


def test_lines_arrive_one_by_one_both_ways() -> None:
    async def test(w: World) -> None:
        async def echo(request: Request) -> Response:
            return Response(200, request.stream(), [("Content-Type", "application/connect+json")])

        w.guest.ports[80] = await w.serve(echo)
        queue: asyncio.Queue[bytes] = asyncio.Queue()

        async def lines() -> AsyncIterator[bytes]:
            while line := await queue.get():
                yield line

        response = await w.ask("POST", "/", body=lines())
        for n in range(5):
            queue.put_nowait(b"line %d\n" % n)
            assert await anext(response.body) == b"line %d\n" % n
        queue.put_nowait(b"")
        assert await response.read() == b""
        await settled(lambda: not any(u._busy for u in w.proxy._upstreams.values()))

    in_world(test)


def test_expect_continue_passes_the_proxy_hop_by_hop() -> None:
    async def test(w: World) -> None:
        async with w.raw() as raw:
            await raw.send(
                b"PUT / HTTP/1.1\r\nHost: 80-iabc.e2b.test\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
            )
            assert (await raw.head())[0] == 100
            await raw.send(b"ok")
            assert json.loads((await raw.answer())[2])["body"] == "ok"

    in_world(test)


async def hanging(w: World, started: asyncio.Event, ended: asyncio.Event) -> None:
    """Guest port 80 starts an answer that never ends, and notes when its client goes."""

    async def forever() -> AsyncIterator[bytes]:
        try:
            yield b"first"
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def handler(request: Request) -> Response:
        if request.path == "/headless":
            started.set()
            request.on_disconnect(ended.set)
            await ended.wait()
        return Response(200, forever())

    w.guest.ports[80] = await w.serve(handler)


@pytest.mark.parametrize("path", ["/", "/headless"])
def test_client_that_goes_takes_the_guest_connection_along(path: str) -> None:
    async def test(w: World) -> None:
        started, ended = asyncio.Event(), asyncio.Event()
        await hanging(w, started, ended)
        async with w.raw() as raw:
            await raw.send(GET.replace(b" / ", f" {path} ".encode()))
            await started.wait()
        await ended.wait()
        await settled(lambda: all(u.size == 0 for u in w.proxy._upstreams.values()))

    in_world(test)


def test_killed_sandbox_drops_its_connections_at_once() -> None:
    async def test(w: World) -> None:
        started, ended = asyncio.Event(), asyncio.Event()
        await hanging(w, started, ended)
        async with w.raw() as streaming, w.raw() as waiting:
            await streaming.send(GET)
            await streaming.reader.readuntil(b"first")
            await waiting.send(GET.replace(b" / ", b" /headless "))
            await settled(lambda: len(w.guest.connects) == 2)
            await started.wait()
            w.guest.kill()
            assert b"0\r\n\r\n" not in await streaming.ends()
            status, _, body = await waiting.answer()
            assert (status, json.loads(body)["message"]) == (502, "The sandbox was not found")
        assert not w.proxy._upstreams

    in_world(test)


def upgraded(test: Any) -> None:
    """Run `test(world, raw)` with a raw connection that port 80 has upgraded to an echo."""

    async def prepare(w: World) -> None:
        async def handler(request: Request) -> Response:
            assert (request.upgrade, request.headers.get("sec-websocket-key")) == ("websocket", "k")
            return UpgradeResponse([("Upgrade", "websocket"), ("Sec-WebSocket-Accept", "a")], echo)

        async def echo(stream: Stream) -> None:
            while data := await stream.read():
                stream.write(data)
                await stream.drain()
            stream.write(b"bye")

        w.guest.ports[80] = await w.serve(handler)
        async with w.raw() as raw:
            await raw.send(
                b"GET /ws HTTP/1.1\r\nHost: 80-iabc.e2b.test\r\nConnection: keep-alive, Upgrade\r\n"
                b"Upgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\nearly"
            )
            status, fields = await raw.head()
            assert (status, fields["upgrade"], fields["connection"]) == (101, "websocket", "Upgrade")
            assert fields["sec-websocket-accept"] == "a"
            assert await raw.reader.readexactly(5) == b"early"
            await test(w, raw)
        await settled(lambda: all(u.size == 0 for u in w.proxy._upstreams.values()))

    in_world(prepare)


def test_upgrade_is_a_raw_bridge_with_half_close() -> None:
    async def test(w: World, raw: Any) -> None:
        await raw.send(b"\0\xff raw")
        assert await raw.reader.readexactly(6) == b"\0\xff raw"
        raw.writer.write_eof()
        assert await raw.ends() == b"bye"

    upgraded(test)


def test_upgraded_connection_ends_with_its_sandbox() -> None:
    async def test(w: World, raw: Any) -> None:
        w.guest.kill()
        assert await raw.ends() == b""

    upgraded(test)


def test_upgraded_connection_ends_with_its_client() -> None:
    async def test(w: World, raw: Any) -> None:
        raw.writer.transport.abort()

    upgraded(test)


def test_bridge_holds_the_sender_back() -> None:
    async def test(w: World, raw: Any) -> None:
        raw.writer.write(bytes(120_000_000))
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert (
            raw.writer.transport.get_write_buffer_size() > 20_000_000
        )  # nobody reads the echo; the rest fills sockets
        got = 0
        while got < 120_000_000:
            got += len(await raw.reader.read(1 << 20))

    upgraded(test)


def test_refused_upgrade_is_an_ordinary_answer() -> None:
    async def test(w: World) -> None:
        async with w.raw() as raw:
            await raw.send(GET[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + GET)
            assert json.loads((await raw.answer())[2])["target"] == "/"
            assert (await raw.answer())[0] == 200

    in_world(test)


SIZE = 256 << 20


def test_large_transfers_do_not_grow_the_daemon() -> None:
    async def test(w: World) -> None:
        async def handler(request: Request) -> Response:
            total = sum([len(piece) async for piece in request.stream()])
            if total:
                return Response(200, str(total).encode())
            return Response(200, zeros(), [("Content-Length", str(SIZE))] if request.path == "/length" else [])

        async def zeros() -> AsyncIterator[bytes]:
            for _ in range(SIZE >> 20):
                yield block

        block = bytes(1 << 20)
        w.guest.ports[80] = await w.serve(handler)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for path in ("/length", "/chunked"):
            response = await w.ask("GET", path)
            assert sum([len(piece) async for piece in response.body]) == SIZE
        assert await (await w.ask("POST", "/", body=zeros())).read() == str(SIZE).encode()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 48 << 10  # KiB; client, proxy and guest are all this process

    in_world(test)


def test_hundreds_of_streams_at_a_time() -> None:
    async def test(w: World) -> None:
        async def echo(request: Request) -> Response:
            return Response(200, request.stream())

        w.guest.ports[80] = await w.serve(echo)

        async def one(n: int) -> None:
            async def two() -> AsyncIterator[bytes]:
                yield b"%d" % n
                await together.wait()

            response = await w.ask("POST", "/", body=two())
            assert await anext(response.body) == b"%d" % n
            ready.append(n)
            if len(ready) == 300:
                together.set()
            assert await response.read() == b""

        together = asyncio.Event()
        ready: list[int] = []
        streams: list[Coroutine[Any, Any, None]] = [one(n) for n in range(300)]
        await asyncio.gather(*streams)

    in_world(test)


def test_unused_guest_is_never_connected() -> None:
    """A second sandbox on the node sees nothing of traffic for the first."""

    async def test(w: World) -> None:
        other = w.table.guests["iother"] = Guest()
        assert (await w.ask()).status == 200
        assert other.connects == []

    in_world(test)
