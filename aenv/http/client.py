"""The HTTP/1.1 client: one request at a time on one connection. Pools, retries and addresses are the caller's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from enum import Enum
from typing import Any, cast

from aenv.errors import AenvError
from aenv.http.body import Body, Decoder, FramingError, decoder_for
from aenv.http.head import (
    UNTIL_CLOSE,
    ProtocolError,
    ResponseHead,
    encode_request_head,
    parse_response_head,
)
from aenv.http.message import Headers
from aenv.http.stream import Stream

MAX_HEAD = 64 * 1024  # bytes of a response head
MAX_INTERIM = 32  # 1xx answers before the final one
JOIN_LIMIT = 64 * 1024  # a head and a body up to this many bytes are sent by one write
WRITE_HIGH_WATER = 512 * 1024

RequestBody = bytes | AsyncIterator[bytes] | None


class ConnectError(AenvError):
    """No connection could be made. `__cause__` is the OSError or TimeoutError."""


class ConnectionLostError(AenvError):
    """The connection ended before the response did. `answered` says whether any byte of it had arrived."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


class _State(Enum):
    IDLE = "idle"  # ready for a request
    HEAD = "head"  # a request is sent; waits for the head of the response
    BODY = "body"  # the response's body arrives
    SWITCHED = "switched"  # 101 was received: the connection speaks another protocol now
    CLOSED = "closed"


class ClientResponse:
    """A response whose body is still arriving: iterate `body`, or `read` it. For 101 use `Connection.detach`."""

    __slots__ = ("body", "headers", "status", "version")

    def __init__(self, status: int, version: str, headers: Headers, body: Body) -> None:
        self.status = status
        self.version = version
        self.headers = headers
        self.body = body

    async def read(self, limit: int = 16 * 1024 * 1024) -> bytes:
        """The whole body. Raises HttpError 413 beyond `limit` bytes, ConnectionLostError, ProtocolError."""
        return await self.body.read(limit)


class Connection(asyncio.Protocol):
    """A client connection. After a response was read to its end, `reusable` says whether it takes another request.

    All failures close it: ConnectionLostError when the peer went away, ProtocolError when it broke HTTP.
    """

    __slots__ = (
        "_body",
        "_buffer",
        "_decoder",
        "_draining",
        "_eof",
        "_head",
        "_head_only",
        "_interim",
        "_keep_alive",
        "_loop",
        "_reading_held",
        "_sender",
        "_state",
        "_transport",
        "_write_paused",
        "requests",
    )

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._state = _State.IDLE
        self._buffer = b""
        self._head: asyncio.Future[ClientResponse] | None = None
        self._head_only = False
        self._interim = 0
        self._body: Body | None = None
        self._decoder: Decoder | None = None
        self._keep_alive = True
        self._eof = False
        self._reading_held = False
        self._sender: asyncio.Task[None] | None = None
        self._write_paused = False
        self._draining: asyncio.Future[None] | None = None
        self.requests = 0  # sent so far

    @classmethod
    async def open(cls, sock: socket.socket, address: Any = None, *, timeout: float | None = None) -> Connection:
        """Wrap a non-blocking stream socket, after connecting it to `address` when one is given (within `timeout`
        seconds). The socket belongs to the connection from the call on. Raises ConnectError."""
        loop = asyncio.get_running_loop()
        try:
            if address is not None:
                async with asyncio.timeout(timeout):
                    await loop.sock_connect(sock, address)
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _, connection = await loop.create_connection(cls, sock=sock)
        except TimeoutError as error:
            sock.close()
            raise ConnectError("connection timed out") from error
        except OSError as error:
            sock.close()
            raise ConnectError(f"cannot connect: {error.strerror or error}") from error
        except BaseException:
            sock.close()
            raise
        return connection

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent now."""
        return self._state is _State.IDLE and not self._transport.is_closing()

    @property
    def closed(self) -> bool:
        """Whether the connection is gone or going."""
        return self._state is _State.CLOSED

    async def request(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[str, str]],
        body: RequestBody = None,
        *,
        length: int | None = None,
    ) -> ClientResponse:
        """Send a request and wait for the head of its response (1xx are skipped, 101 is final).

        `headers` must hold Host and no framing fields. An iterator is sent with Content-Length `length`, or chunked
        when that is None, piece by piece while the response is already awaited; the peer may answer before it has
        read everything. Raises ConnectionLostError, ProtocolError, ValueError for what cannot be sent, and whatever
        the body's iterator raises. Cancellation closes the connection.
        """
        if not self.reusable:
            raise ConnectionLostError("the connection is not usable", answered=False)
        fields = list(headers)
        iterator: AsyncIterator[bytes] | None = None
        payload = b""
        if body is None:
            if method in ("POST", "PUT", "PATCH"):
                fields.append(("Content-Length", "0"))
        elif isinstance(body, bytes):
            payload = body
            fields.append(("Content-Length", str(len(body))))
        else:
            iterator = body
            fields.append(("Transfer-Encoding", "chunked") if length is None else ("Content-Length", str(length)))
        head = encode_request_head(method, target, fields)
        self.requests += 1
        self._state = _State.HEAD
        self._head_only = method == "HEAD"
        self._interim = 0
        answer: asyncio.Future[ClientResponse] = self._loop.create_future()
        self._head = answer
        if len(payload) <= JOIN_LIMIT:
            self._transport.write(head + payload)
        else:
            self._transport.writelines([head, payload])
        if iterator is not None:
            self._sender = self._loop.create_task(self._send_body(iterator, length))
        try:
            return await answer
        except BaseException:
            self.abort()
            raise
        finally:
            self._head = None

    async def _send_body(self, body: AsyncIterator[bytes], length: int | None) -> None:
        sent = 0
        try:
            async for piece in body:
                if not piece:
                    continue
                sent += len(piece)
                if length is not None:
                    if sent > length:
                        raise ValueError("request body is longer than its Content-Length")
                    self._transport.write(piece)
                elif len(piece) <= JOIN_LIMIT:
                    self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                else:
                    self._transport.writelines([b"%x\r\n" % len(piece), piece, b"\r\n"])
                if self._write_paused:
                    self._draining = self._loop.create_future()
                    await self._draining
                if self._transport.is_closing():
                    return
            if length is None:
                self._transport.write(b"0\r\n\r\n")
            elif sent < length:
                raise ValueError("request body is shorter than its Content-Length")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # of the iterator: the request can never be completed
            self._fail(error)
        finally:
            self._sender = None

    def detach(self) -> Stream:
        """After a 101: the raw connection, with what the peer has already sent on it."""
        if self._state is not _State.SWITCHED:
            raise ConnectionLostError("the connection was not switched to another protocol", answered=True)
        self._state = _State.CLOSED
        rest, self._buffer = self._buffer, b""
        return Stream(self._transport, rest, eof=self._eof)

    def restart(self) -> None:
        """After a 101 that made the peer a relay: speak HTTP again, to whoever is behind it. Raises
        ConnectionLostError, and ProtocolError when that one has spoken first."""
        if self._state is not _State.SWITCHED or self._eof or self._transport.is_closing():
            raise ConnectionLostError("the connection is closed", answered=False)
        if self._buffer:
            self.abort()
            raise ProtocolError("data before the first request")
        self._state = _State.IDLE
        self._keep_alive = True
        self.requests = 0

    def close(self) -> None:
        """Close after what is buffered was sent."""
        self._transport.close()
        self._fail(ConnectionLostError("the connection was closed", answered=True))

    def abort(self) -> None:
        """Close at once; whoever waits for the response gets ConnectionLostError."""
        self._transport.abort()
        self._fail(ConnectionLostError("the connection was closed", answered=True))

    # -- called by the transport ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        if self._state is _State.BODY:
            self._body_received(data)
        elif self._state is _State.HEAD:
            self._buffer = self._buffer + data if self._buffer else data
            try:
                self._head_received()
            except ProtocolError as error:
                self._fail(error)
        elif self._state is _State.SWITCHED:
            self._buffer += data
            if len(self._buffer) > MAX_HEAD:
                self._hold(True)
        else:  # nothing was asked: the peer's idea of this connection is not ours
            self._transport.abort()
            self._state = _State.CLOSED

    def eof_received(self) -> bool:
        if self._state is _State.SWITCHED:
            self._eof = True  # the stream to come is told
            return self._transport.can_write_eof()
        if self._state is _State.BODY and self._decoder is not None and self._decoder.at_eof():
            self._keep_alive = False
            self._finish(b"")
        else:
            self._fail(self._lost())
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._state is _State.BODY and exc is None and self._decoder is not None and self._decoder.at_eof():
            self._keep_alive = False
            self._finish(b"")
        self._fail(self._lost())
        if self._draining is not None and not self._draining.done():
            self._draining.set_result(None)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._draining is not None and not self._draining.done():
            self._draining.set_result(None)

    # -- input ------------------------------------------------------------------------------------------------------

    def _head_received(self) -> None:
        while self._state is _State.HEAD:
            end = _head_end(self._buffer)
            if end < 0:
                if len(self._buffer) > MAX_HEAD:
                    raise ProtocolError(f"response head: longer than {MAX_HEAD} bytes")
                return
            head = parse_response_head(self._buffer[:end])
            self._buffer = self._buffer[end:]
            if head.status == 101:
                self._state = _State.SWITCHED
                self._answer(head, 0)
            elif head.status < 200:
                self._interim += 1
                if self._interim > MAX_INTERIM:
                    raise ProtocolError("too many interim responses")
            else:
                self._begin_body(head)

    def _begin_body(self, head: ResponseHead) -> None:
        length = head.length
        if self._head_only or head.status in (204, 304):
            length = 0
        self._keep_alive = head.keep_alive and length != UNTIL_CLOSE
        self._state = _State.BODY
        self._decoder = decoder_for(length) if length else None
        body = self._answer(head, length)
        rest, self._buffer = self._buffer, b""
        if length == 0:
            self._finish(rest)
        elif rest:
            self._body = body
            self._body_received(rest)

    def _answer(self, head: ResponseHead, length: int) -> Body:
        body = self._body = Body(length, self._hold)
        if self._head is not None and not self._head.done():
            self._head.set_result(ClientResponse(head.status, head.version, head.headers, body))
        return body

    def _body_received(self, data: bytes) -> None:
        assert self._decoder is not None
        assert self._body is not None
        pieces: list[bytes] = []
        try:
            rest = self._decoder.feed(data, pieces)
        except FramingError as error:
            self._body.feed(pieces)
            self._fail(ProtocolError(f"response body: {error}"))
            return
        self._body.feed(pieces)
        if rest is not None:
            self._finish(rest)

    def _finish(self, rest: bytes) -> None:
        """The response is complete."""
        assert self._body is not None
        body = self._body
        self._body = None
        self._decoder = None
        if self._sender is not None:  # answered without waiting for the whole request: framing is lost
            self._sender.cancel()
            self._sender = None
            self._keep_alive = False
        if rest or not self._keep_alive:
            self._state = _State.CLOSED
            self._transport.close()
        else:
            self._state = _State.IDLE
        body.finish()

    def _lost(self) -> ConnectionLostError:
        answered = self._state is _State.BODY or bool(self._buffer) or self._interim > 0
        return ConnectionLostError("the peer closed the connection", answered=answered)

    def _fail(self, error: Exception) -> None:
        """Close the connection for a reason, and tell whoever waits."""
        self._state = _State.CLOSED
        self._transport.abort()
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        if self._body is not None:
            self._body.fail(error)
            self._body = None
        if self._sender is not None and self._sender is not asyncio.current_task(self._loop):
            self._sender.cancel()
            self._sender = None

    def _hold(self, full: bool) -> None:
        if self._transport.is_closing():
            return
        if full and not self._reading_held:
            self._transport.pause_reading()
        elif not full and self._reading_held:
            self._transport.resume_reading()
        self._reading_held = full


def _head_end(buffer: bytes) -> int:
    """Where the head ends (after its empty line), or -1. Lines may end with a bare LF, see `parse_response_head`."""
    strict = buffer.find(b"\r\n\r\n")
    bare = buffer.find(b"\n\n", 0, strict if strict >= 0 else len(buffer))
    if bare >= 0:
        return bare + 2
    if strict >= 0:
        return strict + 4
    mixed = buffer.find(b"\n\r\n")
    return mixed + 3 if mixed >= 0 else -1
