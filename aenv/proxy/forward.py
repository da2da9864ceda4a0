"""Forwards requests to ports of sandboxes and streams the answers back."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from aenv.errors import AenvError, ConflictError, NotFoundError
from aenv.http.body import Body
from aenv.http.client import ClientResponse, ConnectError, Connection, ConnectionLostError
from aenv.http.head import CHUNKED, ProtocolError
from aenv.http.message import (
    ClientDisconnectedError,
    Handler,
    Headers,
    HttpError,
    Request,
    Response,
    UpgradeResponse,
)
from aenv.http.stream import Stream, bridge
from aenv.proxy.pool import EndedError, PortClosedError, TooManyConnectionsError, Upstream
from aenv.proxy.route import ID_HEADER, PORT_HEADER, Route, route
from aenv.proxy.target import ENVD_PORT, Resolver, ResumeDeniedError, Target

TRAFFIC_HEADER = "E2b-Traffic-Access-Token"
MACHINES = 3  # of one sandbox that a request tries, when each ends before it has seen anything of it

# What of envd's HTTP surface is for clients; everything else there is for this daemon only.
_PUBLIC_PATHS = frozenset(("/health", "/metrics", "/envs", "/files", "/files/compose"))
_PUBLIC_PREFIXES = ("/process.Process/", "/filesystem.Filesystem/")

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
_NOT_FORWARDED = _HOP_BY_HOP | {
    "host", "content-length", "expect", ID_HEADER.lower(), PORT_HEADER.lower(), TRAFFIC_HEADER.lower(), "x-api-key",
    "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Bounds per sandbox; times in seconds."""

    max_connections: int = 1024  # open at a time; more get 429
    max_idle: int = 32  # kept for reuse, per port
    idle_timeout: float = 30.0  # below the usual keep-alive time of servers, so that they seldom close first
    connect_timeout: float = 10.0


class Proxy:
    """The data plane of one node."""

    def __init__(self, resolver: Resolver, *, domain: str | None = None, limits: ProxyLimits | None = None) -> None:
        self._resolver = resolver
        self._domain = domain
        self._limits = limits or ProxyLimits()
        self._upstreams: dict[tuple[str, str], Upstream] = {}
        self._loop = asyncio.get_running_loop()
        self._sweeper: asyncio.TimerHandle | None = None

    def handler(self, control: Handler) -> Handler:
        """A handler for the server: requests for sandboxes are forwarded, all others go to `control`."""

        async def handle(request: Request) -> Response:
            found = route(request, self._domain)
            return await (control(request) if found is None else self.forward(request, found))

        return handle

    async def forward(self, request: Request, to: Route) -> Response:
        """The answer of the sandbox's port, or the error answer that the E2B SDKs look for."""
        try:
            return await self._forward(request, to)
        except PortClosedError:
            return _answer(502, "The sandbox is running but port is not open", to, port=to.port)
        except NotFoundError:
            return _answer(502, "The sandbox was not found", to)
        except ConflictError as error:
            return _answer(409, error.message, to)
        except ResumeDeniedError as error:
            return _answer(403, error.message, to)
        except TooManyConnectionsError as error:
            return _answer(429, error.message, to)
        except TimeoutError:
            return _answer(504, "The sandbox did not accept the connection in time", to, port=to.port)
        except (HttpError, ClientDisconnectedError):
            raise
        except ProtocolError as error:
            return _answer(502, f"The server in the sandbox did not speak HTTP: {error.message}", to, port=to.port)
        except ConnectionLostError:
            return _answer(502, "The server in the sandbox closed the connection", to, port=to.port)
        except (ConnectError, OSError) as error:
            return _answer(502, f"The sandbox cannot be reached: {error}", to, port=to.port)
        except AenvError as error:
            return _answer(502, error.message, to)

    async def _forward(self, request: Request, to: Route) -> Response:
        envd = to.port == ENVD_PORT
        if envd and not _is_public(request.path):
            raise HttpError(404, "not found")
        if not envd and not _may_pass(request, self._resolver.traffic_token(to.sandbox_id)):
            return _answer(403, "The traffic access token is missing or wrong", to)
        for _ in range(MACHINES):
            target = await self._resolver.resolve(to.sandbox_id, to.port, request.path, envd)
            try:
                return await self._exchange(request, to.port, target)
            except EndedError:
                continue  # it ended just now and has seen nothing: the sandbox may have another machine, or wake up
        raise NotFoundError("The sandbox was not found")

    async def _exchange(self, request: Request, port: int, target: Target) -> Response:
        try:
            upstream = self._upstream(target)
        except BaseException:
            target.ended()
            raise
        try:
            return await _Exchange(self, upstream, request, port, target.ended).run()
        except (ConnectionLostError, PortClosedError, ConnectError, OSError) as error:
            if upstream.ended:
                raise NotFoundError("The sandbox was not found") from error
            raise

    def _upstream(self, target: Target) -> Upstream:
        key = (target.sandbox_id, target.incarnation)
        upstream = self._upstreams.get(key)
        if upstream is None:
            if target.closed.done():
                raise EndedError("the sandbox has ended")

            def forget() -> None:
                self._upstreams.pop(key, None)

            upstream = self._upstreams[key] = Upstream(
                target,
                max_connections=self._limits.max_connections,
                max_idle=self._limits.max_idle,
                on_ended=forget,
            )
        return upstream

    async def connect(self, upstream: Upstream, port: int) -> Connection:
        """A new connection within the time limit. Raises as `Upstream.open`."""
        async with asyncio.timeout(self._limits.connect_timeout):
            return await upstream.open(port)

    def release(self, upstream: Upstream, port: int, connection: Connection) -> None:
        """For an exchange: its connection is free again."""
        upstream.release(port, connection, self._loop.time())
        if self._sweeper is None and connection.reusable:
            self._sweeper = self._loop.call_later(self._limits.idle_timeout, self._sweep)

    def _sweep(self) -> None:
        before = self._loop.time() - self._limits.idle_timeout
        self._sweeper = None
        for key, upstream in list(self._upstreams.items()):
            if not upstream.expire(before):
                upstream.close()
                del self._upstreams[key]
        if self._upstreams:
            self._sweeper = self._loop.call_later(self._limits.idle_timeout, self._sweep)

    def close(self) -> None:
        """Drop all connections into sandboxes."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for upstream in self._upstreams.values():
            upstream.close()
        self._upstreams.clear()


class _Exchange:
    """One forwarded request. It holds one connection from `run` until the answer's end, and gives it back once."""

    __slots__ = ("_connection", "_ended", "_port", "_proxy", "_request", "_upstream")

    def __init__(
        self, proxy: Proxy, upstream: Upstream, request: Request, port: int, ended: Callable[[], None]
    ) -> None:
        self._proxy = proxy
        self._upstream = upstream
        self._request = request
        self._port = port
        self._ended = ended
        self._connection: Connection | None = None

    async def run(self) -> Response:
        try:
            response = await self._send()
            if response.status == 101 and self._request.upgrade is None:
                raise ProtocolError("it switched protocols unasked")
        except BaseException:
            self.finish(abort=True)
            raise
        assert self._connection is not None
        if response.status == 101:
            return self._switch(response, self._connection)
        headers = _end_to_end(response.headers)
        body = response.body
        if body.complete and self._connection.reusable:  # it came with the head: answer in one write
            data = body.take()
            self.finish()
            if body.length == 0 and self._request.method == "HEAD":
                return Response(response.status, None, headers)
            return Response(response.status, data, headers)
        return Response(response.status, _Relay(self, body), headers)

    async def _send(self) -> ClientResponse:
        request = self._request
        fields = request_fields(request, self._upstream.target, self._port)
        if request.upgrade is not None:
            fields += [("Connection", "Upgrade"), ("Upgrade", request.upgrade)]
        request.on_disconnect(self._client_gone)
        reused = self._upstream.reuse(self._port) if request.upgrade is None else None
        if reused is not None:
            self._connection = reused
            body, length = _body_of(request)
            try:
                return await reused.request(request.method, request.target, fields, body, length=length)
            except ConnectionLostError as error:
                # The server closed its idle connection just as we used it. Nothing was answered and nothing of the
                # client's body is gone, so the request can be sent again.
                if error.answered or body is not None or self._upstream.ended or request.disconnected:
                    raise
                self._give_back(abort=True)
        connection = await self._proxy.connect(self._upstream, self._port)
        self._connection = connection
        if request.disconnected:
            raise ClientDisconnectedError
        body, length = _body_of(request)
        return await connection.request(request.method, request.target, fields, body, length=length)

    def _client_gone(self) -> None:
        if self._connection is not None:
            self._connection.abort()

    def _switch(self, response: ClientResponse, connection: Connection) -> Response:
        guest = connection.detach()
        self._connection = None
        self._ended()
        upstream = self._upstream
        client: Stream | None = None

        def abort() -> None:
            guest.abort()
            if client is not None:
                client.abort()
            upstream.forget_stream(abort)

        async def run(stream: Stream) -> None:
            nonlocal client
            client = stream
            try:
                await bridge(stream, guest)
            finally:
                abort()

        self._request.on_disconnect(abort)  # until the server hands its side over
        upstream.keep_stream(abort, connection)
        fields = [(n, v) for n, v in response.headers if n.lower() not in _HOP_BY_HOP or n.lower() == "upgrade"]
        return UpgradeResponse(fields, run)

    def finish(self, *, abort: bool = False) -> None:
        """The exchange is over: give the connection back. May be called again."""
        self._ended()
        self._give_back(abort=abort)

    def _give_back(self, *, abort: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if abort:
                connection.abort()
            self._proxy.release(self._upstream, self._port, connection)


class _Relay:
    """The body of an answer on its way from the guest to the client; frees the connection at its end."""

    __slots__ = ("_body", "_exchange")

    def __init__(self, exchange: _Exchange, body: Body) -> None:
        self._exchange = exchange
        self._body = body

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await self._body.__anext__()

    async def aclose(self) -> None:
        self._exchange.finish(abort=not self._body.complete)


def _is_public(path: str) -> bool:
    """Whether clients may use this path of envd. It is compared as sent: envd decodes nothing before it routes, and an
    encoded or dotted way to an internal path does not match."""
    return path in _PUBLIC_PATHS or (path.startswith(_PUBLIC_PREFIXES) and ".." not in path and "%" not in path)


def _may_pass(request: Request, expected: str | None) -> bool:
    if expected is None:
        return True
    given = request.headers.get_all(TRAFFIC_HEADER)
    return len(given) == 1 and hmac.compare_digest(given[0].encode("latin-1"), expected.encode())


def _body_of(request: Request) -> tuple[AsyncIterator[bytes] | bytes | None, int | None]:
    """The body to send on and its length. A body that has arrived whole is sent with the head, in one write; it is
    still taken from the client only once."""
    body = request.body
    if body is None:
        return None, None
    if body.complete:
        return body.take(), None
    return body, None if body.length == CHUNKED else body.length


def request_fields(request: Request, target: Target, port: int) -> list[tuple[str, str]]:
    """The header fields to send to the guest (RFC 9110 §7.6)."""
    named = set(request.headers.tokens("connection"))
    fields = [item for item in request.headers if (low := item[0].lower()) not in _NOT_FORWARDED and low not in named]
    host = request.headers.get("host") or ""
    masked = host
    if target.mask_host is not None and port != ENVD_PORT:
        masked = target.mask_host.replace("${PORT}", str(port))
    before = request.headers.get_all("x-forwarded-for")
    fields += [
        ("Host", masked),
        ("X-Forwarded-Host", host),
        ("X-Forwarded-Proto", request.scheme),
        ("X-Forwarded-For", ", ".join([*before, request.peer or "unknown"])),
    ]
    return fields


def _end_to_end(headers: Headers) -> Headers:
    named = set(headers.tokens("connection"))
    return Headers(item for item in headers if (low := item[0].lower()) not in _HOP_BY_HOP and low not in named)


def _answer(status: int, message: str, to: Route, **more: Any) -> Response:
    body = {"sandboxId": to.sandbox_id, "message": message, **more, "code": status}
    return Response(status, msgspec.json.encode(body), [("Content-Type", "application/json")])
