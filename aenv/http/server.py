"""The HTTP/1.1 server: one protocol object per connection, one task per run of requests on it.

A connection keeps at most one request in work. Bytes of later, pipelined requests wait unparsed in its buffer, so
answers are in order by construction and a flood of requests holds no more than the buffer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl as tls
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import cast

from aenv.errors import AenvError
from aenv.http.body import Body, Decoder, FramingError, decoder_for
from aenv.http.head import RequestHead, encode_response_head, parse_request_head
from aenv.http.message import (
    ClientDisconnectedError,
    Handler,
    HttpError,
    Request,
    Response,
    UpgradeResponse,
)
from aenv.http.stream import Stream

log = logging.getLogger(__name__)

JOIN_LIMIT = 64 * 1024  # a head and a body up to this many bytes are sent by one write
WRITE_HIGH_WATER = 512 * 1024
_FRAMING = frozenset(("connection", "transfer-encoding", "content-length", "keep-alive"))
_TOKEN_BYTES = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server; sizes in bytes, times in seconds."""

    max_head: int = 32 * 1024
    max_headers: int = 128
    max_target: int = 16 * 1024
    head_timeout: float = 10.0  # from the first byte of a head (or the accept) to its end
    idle_timeout: float = 330.0  # between requests; above the 300 s after which the E2B SDK drops its connections
    linger_timeout: float = 2.0  # how long the rest of a refused body is read, so that the client sees the answer
    discard_limit: int = 256 * 1024  # of a body the handler did not read; beyond it the connection closes
    pipeline_limit: int = 64 * 1024  # of bytes that wait while a request is in work
    max_connections: int = 8192


class _State(Enum):
    HEAD = "head"  # waits for or receives the head of a request
    WORK = "work"  # a request is with its handler, or its answer is being sent
    LINGER = "linger"  # the last answer is sent; input is dropped until the client closes
    UPGRADED = "upgraded"  # the transport belongs to a Stream
    CLOSED = "closed"


class _Connection(asyncio.Protocol):
    """One client connection.

    `deadline` (loop time, 0 = none) is enforced by the server's sweep: the end of the head, of the idle time, of the
    unread body, or of the linger time, depending on the state.
    """

    __slots__ = (
        "_at",
        "_body",
        "_buffer",
        "_decoder",
        "_draining",
        "_eof",
        "_keep_alive",
        "_limits",
        "_loop",
        "_peer",
        "_pending_continue",
        "_read_held",
        "_request",
        "_scanned",
        "_scheme",
        "_server",
        "_state",
        "_streaming",
        "_task",
        "_transport",
        "_write_paused",
        "deadline",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = server.loop
        self._transport: asyncio.Transport
        self._state = _State.HEAD
        self._buffer = b""
        self._at = 0  # start in the buffer of what was not consumed
        self._scanned = 0  # up to here there is no end of the head
        self._body: Body | None = None
        self._decoder: Decoder | None = None  # set while the body of the current request arrives
        self._request: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._keep_alive = True
        self._eof = False
        self._streaming = False  # the handler is done, an iterator gives the body of its answer
        self._pending_continue = False
        self._read_held = 0
        self._write_paused = False
        self._draining: asyncio.Future[None] | None = None
        self._peer = ""
        self._scheme = "http"
        self.deadline = 0.0

    # -- called by the transport ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        peer = transport.get_extra_info("peername")
        self._peer = peer[0] if isinstance(peer, tuple) else ""
        if transport.get_extra_info("sslcontext") is not None:
            self._scheme = "https"
        self._server.connections.add(self)
        self._server.watch()
        self.deadline = self._loop.time() + self._limits.head_timeout
        if len(self._server.connections) > self._limits.max_connections:
            self._refuse(HttpError(503, "too many connections"))

    def data_received(self, data: bytes) -> None:
        if self._decoder is not None:
            self._body_received(data)
            return
        if self._state is _State.LINGER or self._state is _State.CLOSED:
            return
        self._buffer = self._buffer[self._at :] + data if self._at < len(self._buffer) else data
        self._scanned = max(0, self._scanned - self._at)
        self._at = 0
        if self._state is _State.HEAD:
            request = self._next_request()
            if request is not None:
                self._task = self._loop.create_task(self._work(request))
        elif len(self._buffer) > self._limits.pipeline_limit:
            self._hold_reading(2)

    def eof_received(self) -> bool:
        """The client sends no more. A client that died looks the same, so streams stop; but an answer that is nearly
        ready is still delivered to a client that only shut down its side."""
        self._eof = True
        self._keep_alive = False
        if self._state is not _State.WORK:
            return False
        if self._body is not None:
            self._body.fail(ClientDisconnectedError())
        self._client_gone()
        return self._scheme == "http"

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = _State.CLOSED
        self._forget()
        if self._body is not None:
            self._body.fail(ClientDisconnectedError())
        if self._draining is not None and not self._draining.done():
            self._draining.set_exception(ClientDisconnectedError())
        self._client_gone()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._draining is not None and not self._draining.done():
            self._draining.set_result(None)

    # -- called by the server ---------------------------------------------------------------------------------------

    @property
    def working(self) -> asyncio.Task[None] | None:
        """The task of the request in work, if any."""
        return self._task

    def finish(self) -> None:
        """The server is closing: no further request."""
        self._keep_alive = False
        if self._state in (_State.HEAD, _State.LINGER):
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection and the work on it."""
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()
        self._forget()

    def expire(self) -> None:
        """The deadline has passed."""
        self.deadline = 0.0
        if self._state is _State.HEAD and self._at < len(self._buffer):
            self._refuse(HttpError(408, "request head: not received in time"))
        elif self._state is _State.WORK:
            if self._body is not None:
                self._body.fail(HttpError(408, "body: not received in time"))
        else:
            self._transport.abort()

    # -- input ------------------------------------------------------------------------------------------------------

    def _next_request(self) -> Request | None:
        """Parse the next request from the buffer when its head is complete; refuse it when it is wrong."""
        buffer = self._buffer
        if buffer.startswith(b"\r\n", self._at):  # RFC 9112 §2.2: ignore an empty line before the request line
            self._at += 2
        if self._at >= len(buffer):
            self._state = _State.HEAD
            self._scanned = 0
            return None
        end = buffer.find(b"\r\n\r\n", max(self._at, self._scanned - 3))
        try:
            if end < 0:
                self._await_head()
                return None
            if end + 4 - self._at > self._limits.max_head:
                raise self._head_too_large(end)
            head = parse_request_head(
                buffer[self._at : end + 4], max_headers=self._limits.max_headers, max_target=self._limits.max_target
            )
        except HttpError as error:
            self._refuse(error)
            return None
        self._at = end + 4
        self._scanned = 0
        return self._begin(head)

    def _await_head(self) -> None:
        """The head is incomplete: check what is there of it, and start its clock."""
        if self._state is not _State.HEAD or not self._scanned:
            self._state = _State.HEAD
            self.deadline = self._loop.time() + self._limits.head_timeout
        buffer = self._buffer
        if len(buffer) - self._at > self._limits.max_head:
            raise self._head_too_large(len(buffer))
        if buffer[self._at] not in _TOKEN_BYTES and buffer[self._at] != 13:
            raise HttpError(400, "request line: malformed")
        newline = buffer.find(b"\n", max(self._at, self._scanned - 1))
        while newline >= 0:
            if newline == self._at or buffer[newline - 1] != 13:
                raise HttpError(400, "request head: line does not end with CRLF")
            newline = buffer.find(b"\n", newline + 1)
        self._scanned = len(buffer)

    def _head_too_large(self, end: int) -> HttpError:
        line_end = self._buffer.find(b"\r\n", self._at, end)
        if line_end < 0 or line_end - self._at > self._limits.max_target:
            return HttpError(414, f"request target: longer than {self._limits.max_target} bytes")
        return HttpError(431, f"request head: longer than {self._limits.max_head} bytes")

    def _begin(self, head: RequestHead) -> Request:
        """Make the request of a parsed head, and feed what has arrived of its body."""
        self._state = _State.WORK
        self.deadline = 0.0
        self._keep_alive = head.keep_alive and not self._eof and not self._server.closing
        body: Body | None = None
        if head.length != 0:
            self._pending_continue = head.expect_continue
            body = Body(head.length, self._flow, self._send_continue if head.expect_continue else None)
            self._decoder = decoder_for(head.length)
        self._body = body
        self._request = Request(
            head.method,
            head.target,
            head.headers,
            version=head.version,
            body=body,
            peer=self._peer,
            scheme=self._scheme,
            upgrade=head.upgrade if body is None else None,  # an upgrade after a body is never needed: ignore it
        )
        if body is not None and self._at < len(self._buffer):
            rest, self._buffer, self._at = self._buffer[self._at :], b"", 0
            self._body_received(rest)
        return self._request

    def _body_received(self, data: bytes) -> None:
        assert self._decoder is not None
        assert self._body is not None
        self._pending_continue = False
        pieces: list[bytes] = []
        try:
            rest = self._decoder.feed(data, pieces)
        except FramingError as error:
            self._decoder = None
            self._keep_alive = False
            self._state = _State.WORK
            self._body.fail(HttpError(400, f"body: {error}"))
            self._hold_reading(2)
            return
        self._body.feed(pieces)
        if rest is not None:
            self._decoder = None
            self._body.finish()
            self._buffer, self._at, self._scanned = rest, 0, 0

    def _send_continue(self) -> None:
        if self._pending_continue:
            self._pending_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _flow(self, full: bool) -> None:
        if full:
            self._hold_reading(1)
        else:
            self._release_reading(1)

    def _hold_reading(self, reason: int) -> None:
        """Stop reading for a reason: 1 the body's queue is full, 2 too much is pipelined or the rest is garbage."""
        if not self._read_held and not self._transport.is_closing():
            self._transport.pause_reading()
        self._read_held |= reason

    def _release_reading(self, reason: int) -> None:
        if self._read_held:
            self._read_held &= ~reason
            if not self._read_held and not self._transport.is_closing():
                self._transport.resume_reading()

    # -- work -------------------------------------------------------------------------------------------------------

    async def _work(self, first: Request) -> None:
        """Answer requests until the buffer holds no complete one."""
        request: Request | None = first
        try:
            while request is not None:
                response = await self._answer(request)
                try:
                    if isinstance(response, UpgradeResponse):
                        await self._upgrade(request, response)
                        return
                    await self._send(request, response)
                finally:
                    await _close_iterator(response)
                request = await self._next_in_line()
        except (ClientDisconnectedError, asyncio.CancelledError):
            self._break_off()
        except AenvError as error:
            log.info("answer to %s broke off: %s", self._peer, error)
            self._break_off()
        except Exception:
            log.exception("answer to %s broke off", self._peer)
            self._break_off()
        finally:
            self._task = None

    async def _answer(self, request: Request) -> Response:
        try:
            response = await self._server.handler(request)
        except HttpError as error:
            response = Response.error(error.status, error.message, error.headers)
        except ClientDisconnectedError:
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            response = Response.error(500, "internal error")
        if isinstance(response, UpgradeResponse) and request.upgrade is None:
            log.error("%s %s: upgrade was not asked for", request.method, request.path)
            response = Response.error(500, "internal error")
        return response

    async def _next_in_line(self) -> Request | None:
        """After an answer: get rid of an unread body, then take the next pipelined request, or wait for one."""
        body = self._body
        if body is not None and not body.complete:
            if self._keep_alive and not self._pending_continue and self._decoder is not None:
                self.deadline = self._loop.time() + self._limits.linger_timeout
                if not await body.discard(self._limits.discard_limit):
                    self._keep_alive = False
            else:
                self._keep_alive = False
        elif body is not None and body.buffered:
            body.take()
        self._body = None
        self._request = None
        if not self._keep_alive:
            self._end()
            return None
        self._release_reading(2)
        self._state = _State.HEAD
        self.deadline = self._loop.time() + self._limits.idle_timeout
        return self._next_request()

    def _refuse(self, error: HttpError) -> None:
        """Answer a request that could not be parsed, and close."""
        self._keep_alive = False
        response = Response.error(error.status, error.message)
        assert isinstance(response.body, bytes)
        fields = [*response.headers, ("Content-Length", str(len(response.body))), ("Connection", "close")]
        self._transport.write(encode_response_head(error.status, fields) + response.body)
        self._end(unread=True)

    def _end(self, unread: bool = False) -> None:
        """The last answer is written. When the client may still be sending, closing now would make the kernel send a
        reset, which can destroy the answer on its way; so end our side only and drop input for a while."""
        unread = unread or self._decoder is not None or self._read_held != 0
        self._decoder = None
        self._buffer = b""
        self._at = 0
        if not unread or self._eof or self._transport.is_closing():
            self._state = _State.CLOSED
            self._transport.close()
            return
        self._state = _State.LINGER
        self.deadline = self._loop.time() + self._limits.linger_timeout
        self._server.watch()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._read_held = 1
        self._release_reading(1)

    def _break_off(self) -> None:
        """End in the middle of an answer, by a reset. An orderly end of the connection would say that nothing went
        wrong below HTTP, and the E2B SDKs look whether a sandbox is gone only when something did."""
        reset_on_close(self._transport)
        self._transport.abort()

    def _client_gone(self) -> None:
        if self._request is not None:
            self._request.notify_disconnect()
        if self._streaming and self._task is not None:
            self._task.cancel()

    def _forget(self) -> None:
        self._server.forget(self)

    # -- output -----------------------------------------------------------------------------------------------------

    async def _send(self, request: Request, response: Response) -> None:
        body = response.body
        status = response.status
        if "close" in response.headers.tokens("connection") or self._pending_continue:
            self._keep_alive = False  # (a client that was not told to continue may or may not send its body)
        fields = [item for item in response.headers if item[0].lower() not in _FRAMING]
        length: int | None = None
        chunked = False
        bodiless = status in (204, 304) or status < 200
        if isinstance(body, bytes) or body is None:
            if request.method == "HEAD" and body is None:  # what GET would say, if the handler knows it
                given = response.headers.get("content-length")
            else:
                given = str(len(body)) if body else "0"
            if given is not None and not bodiless:
                fields.append(("Content-Length", given))
        else:
            given = response.headers.get("content-length")
            if bodiless:
                pass
            elif given is not None:
                length = int(given)
                fields.append(("Content-Length", given))
            elif request.version == "1.1":
                chunked = True
                fields.append(("Transfer-Encoding", "chunked"))
            else:
                self._keep_alive = False
        if not self._keep_alive:
            fields.append(("Connection", "close"))
        elif request.version == "1.0":
            fields.append(("Connection", "keep-alive"))
        try:
            head = encode_response_head(status, fields)
        except (ValueError, UnicodeEncodeError):
            log.exception("%s %s: answer with a header that cannot be sent", request.method, request.path)
            await self._send(request, Response.error(500, "internal error"))
            return
        if self._transport.is_closing():
            raise ClientDisconnectedError
        if request.method == "HEAD" or bodiless or not body:
            self._transport.write(head)
        elif isinstance(body, bytes):
            if len(body) <= JOIN_LIMIT:
                self._transport.write(head + body)
            else:
                self._transport.writelines([head, body])
                await self._drain()
        else:
            self._transport.write(head)
            await self._send_stream(body, chunked, length)

    async def _send_stream(self, body: AsyncIterator[bytes], chunked: bool, length: int | None) -> None:
        self._streaming = True
        transport = self._transport
        sent = 0
        if self._eof:
            raise ClientDisconnectedError
        try:
            async for piece in body:
                if not piece:
                    continue
                if transport.is_closing():
                    raise ClientDisconnectedError
                size = len(piece)
                sent += size
                if length is not None and sent > length:
                    raise RuntimeError("the body is longer than its Content-Length")
                if not chunked:
                    transport.write(piece)
                elif size <= JOIN_LIMIT:
                    transport.write(b"%x\r\n%b\r\n" % (size, piece))
                else:
                    transport.writelines([b"%x\r\n" % size, piece, b"\r\n"])
                if self._write_paused:
                    await self._drain()
        finally:
            self._streaming = False
        if length is not None and sent < length:
            raise RuntimeError("the body is shorter than its Content-Length")
        if chunked:
            transport.write(b"0\r\n\r\n")

    async def _drain(self) -> None:
        if not self._write_paused:
            return
        if self._state is _State.CLOSED:
            raise ClientDisconnectedError
        self._draining = self._loop.create_future()
        try:
            await self._draining
        finally:
            self._draining = None

    async def _upgrade(self, request: Request, response: UpgradeResponse) -> None:
        fields = [item for item in response.headers if item[0].lower() not in _FRAMING]
        fields.append(("Connection", "Upgrade"))
        if "upgrade" not in response.headers:
            fields.append(("Upgrade", request.upgrade or ""))
        head = encode_response_head(101, fields)
        if self._transport.is_closing():
            raise ClientDisconnectedError
        self._transport.write(head)
        self._state = _State.UPGRADED
        stream = Stream(self._transport, self._buffer[self._at :], eof=self._eof)
        self._buffer = b""
        try:
            await response.run(stream)
        finally:
            stream.close()
            self._state = _State.CLOSED
            self._forget()


def reset_on_close(transport: asyncio.BaseTransport) -> None:
    """Have the kernel answer with RST instead of FIN when the socket is closed (socket(7), SO_LINGER of 0 s)."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0 and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _close_iterator(response: Response) -> None:
    close = getattr(response.body, "aclose", None)
    if close is not None:
        await close()


class Server:
    """A listening server. Make it with `Server.start`."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self.handler = handler
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.connections: set[_Connection] = set()
        self.closing = False
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None

    @classmethod
    async def start(
        cls,
        handler: Handler,
        *,
        host: str | None = None,
        port: int = 0,
        sock: socket.socket | None = None,
        ssl: tls.SSLContext | None = None,
        limits: Limits | None = None,
    ) -> Server:
        """Listen on `host`:`port` (port 0 takes a free one) or on the given bound socket. Raises OSError."""
        server = cls(handler, limits or Limits())
        if sock is None:
            sock = await _bind(host or "127.0.0.1", port)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            # Accepted sockets inherit these (Linux), which saves the calls per connection. Keep-alive probes find
            # clients whose host is gone; streams have no other time-out.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        timeout = server.limits.head_timeout if ssl is not None else None
        server._listener = await server.loop.create_server(
            lambda: _Connection(server), sock=sock, ssl=ssl, backlog=4096, ssl_handshake_timeout=timeout
        )
        return server

    @property
    def port(self) -> int:
        """The port that is listened on."""
        assert self._listener is not None
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def close(self, grace: float = 5.0) -> None:
        """Stop accepting, close idle connections, give running requests `grace` seconds, then drop them."""
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.finish()
        if self.connections:
            self._empty = self.loop.create_future()
            try:
                async with asyncio.timeout(grace):
                    await self._empty
            except TimeoutError:
                tasks = [task for connection in self.connections if (task := connection.working) is not None]
                for connection in list(self.connections):
                    connection.abort()
                if tasks:
                    await asyncio.wait(tasks, timeout=grace)
        if self._sweeper is not None:
            self._sweeper.cancel()

    def forget(self, connection: _Connection) -> None:
        """For a connection: it is gone."""
        self.connections.discard(connection)
        if not self.connections and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    def watch(self) -> None:
        """For a connection: see to its deadline. One timer serves all connections, and only while there are any, so
        that a request costs no timer."""
        if self._sweeper is None:
            limits = self.limits
            period = min(1.0, limits.head_timeout / 4, limits.idle_timeout / 4, limits.linger_timeout / 2)
            self._sweeper = self.loop.call_later(period, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now = self.loop.time()
        for connection in [c for c in self.connections if c.deadline and c.deadline <= now]:
            connection.expire()
        if self.connections:
            self.watch()


async def _bind(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
