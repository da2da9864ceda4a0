"""A raw byte stream in both directions: what is left of an HTTP connection after 101 Switching Protocols."""

from __future__ import annotations

import asyncio
from collections import deque

HIGH_WATER = 256 * 1024  # bytes read ahead before the peer is held back


class StreamClosedError(ConnectionError):
    """The stream was closed while it was read or written."""


class Stream(asyncio.Protocol):
    """Takes over a connected transport. Use `read` and `write`/`drain`, or hand two streams to `bridge`.

    Half-close is kept: `read` gives b"" at the peer's end of input, `write_eof` ends our output. (A TLS transport
    cannot half-close; there the end of either direction ends both.)
    """

    def __init__(self, transport: asyncio.Transport, initial: bytes = b"", *, eof: bool = False) -> None:
        self._transport = transport
        self._chunks: deque[bytes] = deque([initial] if initial else [])
        self._size = len(initial)
        self._eof = eof  # the peer has ended its output
        self._eof_sent = False
        self._closed = False
        self._paused = False
        self._write_paused = False
        self._reader: asyncio.Future[None] | None = None
        self._drainer: asyncio.Future[None] | None = None
        self._peer: Stream | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        transport.set_protocol(self)
        if transport.is_closing():
            self._lost()
        else:
            transport.set_write_buffer_limits(high=HIGH_WATER)
            transport.resume_reading()

    @property
    def transport(self) -> asyncio.Transport:
        """For an owner that must drop the connection at once (`abort`)."""
        return self._transport

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""
        return self._closed

    async def read(self) -> bytes:
        """The next bytes, b"" at the end of input. Raises StreamClosedError when the connection broke."""
        while not self._chunks:
            if self._eof:
                return b""
            if self._closed:
                raise StreamClosedError("the connection is closed")
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        data = self._chunks.popleft()
        self._size -= len(data)
        if self._paused and not self._size and not self._closed:
            self._paused = False
            self._transport.resume_reading()
        return data

    def write(self, data: bytes) -> None:
        """Send without waiting. Raises StreamClosedError."""
        if self._closed or self._eof_sent:
            raise StreamClosedError("the connection is closed")
        self._transport.write(data)

    async def drain(self) -> None:
        """Wait until there is room to write. Raises StreamClosedError."""
        if self._closed:
            raise StreamClosedError("the connection is closed")
        if self._write_paused:
            self._drainer = asyncio.get_running_loop().create_future()
            await self._drainer

    def write_eof(self) -> None:
        """No more output from us; the other direction goes on where the transport can half-close."""
        if self._eof_sent or self._closed:
            return
        self._eof_sent = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def close(self) -> None:
        """Send what is buffered, then close."""
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    async def wait_ended(self) -> None:
        """Wait until the connection is gone."""
        await asyncio.shield(self._ended)

    # -- called by the transport ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        peer = self._peer
        if peer is not None:
            if not (peer._closed or peer._eof_sent):
                peer._transport.write(data)
            return
        self._chunks.append(data)
        self._size += len(data)
        if self._size >= HIGH_WATER and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake(self._reader)

    def eof_received(self) -> bool:
        self._eof = True
        self._wake(self._reader)
        if self._peer is not None:
            self._peer.write_eof()
            self._close_when_both_ended()
        return self._transport.can_write_eof()

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._peer is not None and not self._peer._closed:
            self._peer._transport.pause_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._wake(self._drainer)
        if self._peer is not None and not self._peer._closed:
            self._peer._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _lost(self) -> None:
        self._closed = True
        self._wake(self._reader)
        if self._drainer is not None and not self._drainer.done():
            self._drainer.set_exception(StreamClosedError("the connection is closed"))
        self._wake(self._ended)
        if self._peer is not None and not self._peer._closed:
            self._peer.close()

    def _close_when_both_ended(self) -> None:
        peer = self._peer
        if peer is not None and self._eof and peer._eof:
            self.close()
            peer.close()

    def _connect(self, peer: Stream) -> None:
        while self._chunks:
            peer._transport.write(self._chunks.popleft())
        self._peer = peer
        if self._paused and not self._closed:
            self._paused = False
            self._transport.resume_reading()
        if self._eof:
            peer.write_eof()


async def bridge(a: Stream, b: Stream) -> None:
    """Pass bytes both ways until both connections are gone: from transport to transport, without a task in between, a
    slow receiver holding back the sender. The end of input on one side becomes the end of output on the other."""
    a._connect(b)
    b._connect(a)
    for one, other in ((a, b), (b, a)):
        if one._closed and not other._closed:
            other.close()
        elif one._write_paused and not other._closed:
            other._transport.pause_reading()
    a._close_when_both_ended()
    try:
        await a.wait_ended()
        await b.wait_ended()
    finally:
        a.abort()
        b.abort()
