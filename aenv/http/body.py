"""Message bodies: framing decoders without I/O, and the queue between a connection and the body's reader."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Protocol

from aenv.http.head import CHUNKED, UNTIL_CLOSE
from aenv.http.message import HttpError

HIGH_WATER = 512 * 1024  # bytes in a body's queue at which the connection stops reading
LARGE_PIECE = 64 * 1024  # bytes from which pieces are handed on alone: copying them together would cost more
MAX_LINE = 4096  # bytes of a chunk-size line
MAX_TRAILER = 16 * 1024  # bytes of the trailer section

# chunk-size [chunk-ext] (RFC 9112 §7.1). "Bad" whitespace around the size is refused, as llhttp and h11 do.
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class FramingError(Exception):
    """A body broke the rules of its framing."""


class Decoder(Protocol):
    """Takes bytes of a body apart."""

    def feed(self, data: bytes, out: list[bytes]) -> bytes | None:
        """Append content to `out`. Gives None while the body goes on, else the bytes that follow it. Raises
        FramingError."""

    def at_eof(self) -> bool:
        """Whether the body is complete when the connection ends now."""


class LengthDecoder:
    """A body of a known number of bytes, at least 1."""

    __slots__ = ("remaining",)

    def __init__(self, length: int) -> None:
        self.remaining = length

    def feed(self, data: bytes, out: list[bytes]) -> bytes | None:
        size = len(data)
        if size < self.remaining:
            if size:
                out.append(data)
                self.remaining -= size
            return None
        out.append(data[: self.remaining])
        rest = data[self.remaining :]
        self.remaining = 0
        return rest

    def at_eof(self) -> bool:
        return False


class UntilCloseDecoder:
    """A response body that ends with the connection."""

    __slots__ = ()

    def feed(self, data: bytes, out: list[bytes]) -> bytes | None:
        if data:
            out.append(data)
        return None

    def at_eof(self) -> bool:
        return True


class ChunkedDecoder:
    """The chunked transfer coding (RFC 9112 §7.1). Extensions and trailers are checked and dropped."""

    __slots__ = ("_line", "_overhead", "_remaining", "_trailer")

    def __init__(self) -> None:
        self._line = b""  # the part of a size or trailer line that has arrived
        self._remaining = 0  # of the current chunk, with its CRLF (so 2 and less are the CRLF itself)
        self._trailer = False
        self._overhead = 0

    def feed(self, data: bytes, out: list[bytes]) -> bytes | None:
        at = 0
        size = len(data)
        while at < size:
            if self._remaining > 2:
                piece = data[at : at + self._remaining - 2]
                out.append(piece)
                at += len(piece)
                self._remaining -= len(piece)
                continue
            if self._remaining:
                expected = b"\r\n"[2 - self._remaining :]
                piece = data[at : at + self._remaining]
                if not expected.startswith(piece):
                    raise FramingError("chunk does not end with CRLF")
                at += len(piece)
                self._remaining -= len(piece)
                continue
            end = data.find(b"\n", at)
            line = self._line + data[at : end + 1 if end >= 0 else size]
            if len(line) > MAX_LINE:
                raise FramingError("chunk-size or trailer line too long")
            if end < 0:
                self._line = line
                return None
            self._line = b""
            at = end + 1
            if not line.endswith(b"\r\n"):
                raise FramingError("chunk line does not end with CRLF")
            if self._trailer:
                if self._trailer_line(line[:-2]):
                    return data[at:]
            else:
                self._size_line(line[:-2])
        return None

    def _size_line(self, line: bytes) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise FramingError("malformed chunk size")
        length = int(match[1], 16)
        if length:
            self._remaining = length + 2
        else:
            self._trailer = True

    def _trailer_line(self, line: bytes) -> bool:
        if not line:
            return True
        self._overhead += len(line) + 2
        if self._overhead > MAX_TRAILER or not _TRAILER_LINE.fullmatch(line):
            raise FramingError("malformed or too long trailer")
        return False

    def at_eof(self) -> bool:
        return False


def decoder_for(length: int) -> Decoder:
    """The decoder for a body of `length` bytes (> 0), CHUNKED or UNTIL_CLOSE."""
    if length == CHUNKED:
        return ChunkedDecoder()
    if length == UNTIL_CLOSE:
        return UntilCloseDecoder()
    return LengthDecoder(length)


class Body:
    """A body on its way: the connection puts pieces in, one reader takes them out.

    `flow(True)` is called when the queue is full, `flow(False)` when it is empty again; `on_read` once, before the
    first wait for data that is not there yet (the moment to send 100 Continue).
    """

    __slots__ = ("_chunks", "_error", "_flow", "_held", "_on_read", "_size", "_waiter", "complete", "length")

    def __init__(self, length: int, flow: Callable[[bool], None], on_read: Callable[[], None] | None = None) -> None:
        self.length = length  # bytes, CHUNKED or UNTIL_CLOSE
        self.complete = False  # all of it has arrived
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._error: BaseException | None = None
        self._flow = flow
        self._held = False
        self._on_read = on_read
        self._waiter: asyncio.Future[None] | None = None

    @property
    def buffered(self) -> int:
        """Bytes that have arrived and were not read."""
        return self._size

    def feed(self, pieces: list[bytes]) -> None:
        """For the connection: content has arrived."""
        if not pieces or self._error is not None:
            return
        self._on_read = None
        self._chunks.extend(pieces)
        self._size += sum(map(len, pieces))
        if self._size >= HIGH_WATER and not self._held:
            self._held = True
            self._flow(True)
        self._wake()

    def finish(self) -> None:
        """For the connection: the body is complete."""
        self.complete = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """For the connection: the rest will never come. What has arrived can still be read."""
        if not self.complete and self._error is None:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        if self._on_read is not None:
            on_read, self._on_read = self._on_read, None
            on_read()
        if self._waiter is not None:
            raise RuntimeError("a body has one reader")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> bytes:
        """All that has arrived and was not read."""
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._size = 0
        if self._held:
            self._held = False
            self._flow(False)
        return data

    def __aiter__(self) -> Body:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self.complete:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            await self._wait()
        if len(self._chunks) > 1 and len(self._chunks[0]) >= LARGE_PIECE:
            piece = self._chunks.popleft()
            self._size -= len(piece)
            return piece
        return self.take()

    async def read(self, limit: int) -> bytes:
        """The rest of the body. Raises HttpError 413 when it is longer than `limit` bytes."""
        if self.length > limit:
            raise HttpError(413, f"body: longer than {limit} bytes")
        if self.complete and self._size <= limit:
            return self.take()
        pieces = []
        size = 0
        async for piece in self:
            size += len(piece)
            if size > limit:
                raise HttpError(413, f"body: longer than {limit} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    async def discard(self, limit: int) -> bool:
        """Read and drop at most about `limit` bytes. True when the body is complete."""
        dropped = 0
        try:
            async for piece in self:
                dropped += len(piece)
                if dropped > limit:
                    return False
        except Exception:
            return False
        return True
