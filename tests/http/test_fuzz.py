"""The server against h11 as the reference parser: the same bytes, cut anywhere, must give the same requests.

We never accept a request that h11 does not, with one exception: an empty line before the request line is skipped, as
RFC 9112 §2.2 asks. We refuse more than h11 does, on purpose, and only for the reasons in `STRICTER`.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv.http.body import ChunkedDecoder, FramingError
from aenv.http.client import Connection, ConnectionLostError
from aenv.http.head import ProtocolError
from aenv.http.message import Request, Response
from aenv.http.server import Limits, Server, _Connection

# Where two implementations could read different things, the only safe answer is a refusal.
STRICTER = (
    "line does not end with CRLF",  # bare LF and bare CR end no line
    "chunk line does not end with CRLF",
    "unexpected whitespace after header value",  # obs-fold
    "Content-Length: expected one whole number",  # repeated, even when equal
    "duplicate Content-Length",
    "invalid character in Content-Length",
    "Content-Length can't be present with",
    "both Content-Length and Transfer-Encoding",  # h11 lets Transfer-Encoding win
    "Transfer-Encoding",  # also when repeated, or in HTTP/1.0
    "method",  # only methods that are known
    "HTTP version",  # only 1.0 and 1.1
    "Host: malformed",
    "request target",  # a path, a URL or `*`, without fragment
    " in url",  # what is no path and no URL
    "invalid header value char",
    "malformed chunk size",  # white space after the size
    "malformed or too long trailer",
    "Expect:",
)

Seen = tuple[str, str, list[tuple[str, str]], bytes]


class FakeTransport:
    """Records what is written; never full, never closed by the other side."""

    def __init__(self) -> None:
        self.sent = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, pieces: list[bytes]) -> None:
        self.sent += b"".join(pieces)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def get_extra_info(self, name: str) -> Any:
        return None

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def ours(pieces: list[bytes]) -> tuple[list[Seen], bytes]:
    """The requests our server took, and the message of its refusal."""
    seen: list[Seen] = []

    async def handler(request: Request) -> Response:
        body = await request.read(1 << 20)
        seen.append((request.method, request.target, [(n.lower(), v) for n, v in request.headers], body))
        return Response(204)

    async def main() -> bytes:
        server = Server(handler, Limits())
        connection = _Connection(server)
        transport: Any = FakeTransport()
        connection.connection_made(transport)
        for piece in pieces:
            if not transport.closing:
                connection.data_received(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for _ in range(1000):
            if connection.working is None or len(asyncio.all_tasks()) == 1:
                break
            before = len(seen), transport.sent
            for _ in range(4):
                await asyncio.sleep(0)
            if (len(seen), transport.sent) == before:  # the handler waits for a body that will not come
                break
        connection.connection_lost(None)
        while connection.working is not None:
            await asyncio.sleep(0)
        await server.close(grace=0)
        sent: bytes = transport.sent
        return sent

    sent = LOOP.run_until_complete(main())
    found = re.search(rb'"message":"((?:[^"\\]|\\.)*)"', sent)
    return seen, found[1] if found else b""


LOOP = uvloop.new_event_loop()


def reference(data: bytes) -> tuple[list[Seen], bytes | None]:
    """The requests h11 takes; and, when it refuses, what it had not consumed."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    seen: list[Seen] = []
    head: h11.Request | None = None
    body = b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return seen, bytes(connection.trailing_data[0])
        if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
            return seen, None
        if isinstance(event, h11.Request):
            head, body = event, b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            fields = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in head.headers]
            seen.append((head.method.decode(), head.target.decode(), fields, body))
            connection.send(h11.Response(status_code=204, headers=[]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is h11.MUST_CLOSE or connection.their_state is h11.MUST_CLOSE:
                return seen, None
            if connection.our_state is h11.DONE and connection.their_state is h11.DONE:
                connection.start_next_cycle()
        elif event is h11.PAUSED:
            return seen, None


# -- generation: mostly valid messages, in many forms, some with one thing wrong --------------------------------------

ENDS = st.sampled_from([b"\r\n"] * 30 + [b"\n", b"\r", b"\r\r\n", b"\r\n ", b""])
METHODS = st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"BREW", b"get", b"G\0T", b""])
TARGETS = st.sampled_from(
    [
        b"/",
        b"/a/b?c=d",
        b"/%2f%zz",
        b"*",
        b"http://h/p",
        b"/a b",
        b"/\xff",
        b"//x",
        b"/#x",
        b"x",
        b"/" + b"a" * 500,
        b"",
    ]
)
VERSIONS = st.sampled_from([b"HTTP/1.1"] * 12 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b"HTTP/11", b""])
FIELDS = st.sampled_from(
    [
        b"Host: a", b"Host:a:1", b"Host: ", b"Host: a b", b"X: y", b"X:y", b"X: \ty\t ", b"X:", b"X : y", b" X: y",
        b"\tX: y", b"X", b": y", b"X: a\0b", b"X: a\x01b", b"X: a\x7fb", b"X: \xe4", b"X(: y", b"Connection: close",
        b"Connection: x, y", b"Content-Length: 3", b"Content-Length: 0", b"Content-Length: +3", b"Content-Length: 3,3",
        b"Content-Length: 0x3", b"Content-Length: \xb2", b"content-length:3", b"Content-Length: 3 3",
        b"Content-Length: 00003",
        b"Content-Length:", b"Transfer-Encoding: chunked", b"Transfer-Encoding: CHUNKED",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding:\tchunked ", b"Transfer-Encoding: \x0bchunked",
        b"Expect: 100-continue", b"Upgrade: x", b"Connection: upgrade", b"Transfer_Encoding: chunked",
    ]
)  # fmt: skip
CHUNKS = st.lists(
    st.sampled_from(
        [b"3\r\nabc\r\n"] * 6
        + [b"a\r\n0123456789\r\n", b"3;x=y\r\nabc\r\n", b"3 ;x\r\nabc\r\n", b"3 \r\nabc\r\n", b"3\nabc\n",
           b"3\r\nabcd\r\n", b"003\r\nabc\r\n", b"0x3\r\nabc\r\n", b"+3\r\nabc\r\n", b"g\r\n", b"\r\n",
           b"3\r\nabc", b"3;\x01\r\nabc\r\n"]
    ),
    max_size=3,
)  # fmt: skip
LASTS = st.sampled_from(
    [b"0\r\n\r\n"] * 8 + [b"0\r\nA: b\r\n\r\n", b"0\r\n A: b\r\n\r\n", b"0;x\r\n\r\n", b"0\r\nA\r\n\r\n", b""]
)
BODIES = st.one_of(
    st.just(b""), st.just(b"abc"), st.just(b"ab"), st.builds(lambda c, last: b"".join(c) + last, CHUNKS, LASTS)
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    space = draw(st.sampled_from([b" "] * 12 + [b"  ", b"\t", b""]))
    fields = draw(st.lists(FIELDS, max_size=4))
    if draw(st.integers(0, 9)):
        fields.insert(draw(st.integers(0, len(fields))), b"Host: h")
    line = draw(METHODS) + space + draw(TARGETS) + b" " + draw(VERSIONS) + draw(ENDS)
    return line + b"".join(field + draw(ENDS) for field in fields) + draw(ENDS) + draw(BODIES)


@st.composite
def valid_messages(draw: st.DrawFn) -> bytes:
    fields = draw(st.lists(st.sampled_from([b"X: y", b"Accept: */*", b"Y:z", b"Z:"]), max_size=3))
    body = draw(st.binary(max_size=40))
    kind = draw(st.integers(0, 2))
    if kind == 1:
        fields.append(b"Content-Length: %d" % len(body))
    elif kind == 2:
        fields.append(b"Transfer-Encoding: chunked")
        cut = draw(st.integers(0, len(body)))
        parts = [part for part in (body[:cut], body[cut:]) if part]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    else:
        body = b""
    target = draw(st.sampled_from([b"/", b"/a?b", b"/%41"]))
    return b"POST %b HTTP/1.1\r\nHost: h\r\n%b\r\n%b" % (target, b"".join(f + b"\r\n" for f in fields), body)


HEAD = b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED_MESSAGES = st.builds(lambda chunks, last: HEAD + b"".join(chunks) + last, CHUNKS, LASTS)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    data = b"".join(draw(st.lists(st.one_of(messages(), valid_messages(), CHUNKED_MESSAGES), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 2))
        octet = draw(st.sampled_from([b"\r", b"\n", b"\0", b" ", b":", b"\t", b"0", b"\xff", b";", b"a", b","]))
        data = data[:at] + (octet if kind else b"") + data[at + (kind != 1) :]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    return [piece for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if (piece := data[a:b])]


def comparable(seen: Seen) -> Seen:
    """For a target in absolute form we take path and Host out of it."""
    method, target, fields, body = seen
    match = re.fullmatch(r"http://[^/]+(/.*)", target)
    return method, match[1] if match else target, [f for f in fields if f[0] != "host"], body


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(streams())
def test_same_requests_as_h11(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    got, refusal = ours(pieces)
    expected, rest = reference(data)
    common = min(len(got), len(expected))
    assert [comparable(s) for s in got[:common]] == [comparable(s) for s in expected[:common]]
    if len(got) > len(expected):
        assert rest is not None
        assert rest.startswith(b"\r\n")  # the empty line before a request line
    elif len(got) < len(expected):
        assert any(reason.encode() in refusal for reason in STRICTER), refusal
    elif rest is not None and not rest.startswith(b"\r\n"):
        # h11 has refused; we have too, or the end of the head or chunk has not come and the time-out will.
        assert refusal or b"\r\n\r\n" not in rest or got == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(valid_messages(), min_size=1, max_size=4), st.data())
def test_valid_requests_are_all_taken_however_they_are_cut(valid: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(valid)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [p for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if (p := whole[a:b])]
    got, refusal = ours(pieces)
    expected, rest = reference(whole)
    assert (got, refusal, rest) == (expected, b"", None)
    assert len(got) == len(valid)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 12), st.binary(max_size=20))
def test_chunked_decoder_gives_back_what_was_chunked(parts: list[bytes], step: int, after: bytes) -> None:
    data = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts if p) + b"0\r\nT: x\r\n\r\n" + after
    decoder = ChunkedDecoder()
    out: list[bytes] = []
    rest: bytes | None = None
    at = 0
    while rest is None:
        rest = decoder.feed(data[at : at + step], out)
        at += step
    assert b"".join(out) == b"".join(parts)
    assert rest + data[at:] == after


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=10))
def test_chunked_decoder_fails_only_by_framing_error(pieces: list[bytes]) -> None:
    decoder = ChunkedDecoder()
    try:
        for piece in pieces:
            if decoder.feed(piece, []) is not None:
                break
    except FramingError:
        pass


RESPONSE_PARTS = st.sampled_from(
    [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 204 No\r\n", b"HTTP/1.1 100 C\r\n\r\n",
     b"HTTP/1.1 101 S\r\n", b"HTTP/1.0 404\r\n",
     b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Upgrade: x\r\n",
     b"X: y\n",     b"\r\n", b"\r\n", b"\n", b"abc", b"3\r\nabc\r\n", b"0\r\n\r\n"]
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(st.one_of(RESPONSE_PARTS, st.binary(max_size=12)), max_size=12))
def test_client_gives_an_answer_or_one_of_its_errors(parts: list[bytes]) -> None:
    async def main() -> None:
        connection = Connection()
        transport: Any = FakeTransport()
        connection.connection_made(transport)
        head = asyncio.ensure_future(connection.request("GET", "/", [("Host", "x")]))
        await asyncio.sleep(0)
        for part in parts:
            if not transport.closing:
                connection.data_received(part)
        if not transport.closing:
            connection.eof_received()
        connection.connection_lost(None)
        try:
            response = await head
            if response.status != 101:
                await response.read()
        except (ProtocolError, ConnectionLostError):
            return
        assert response.status >= 200 or response.status == 101
        assert connection.closed or response.status == 101

    LOOP.run_until_complete(main())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=40), st.integers(0, 2)), min_size=1, max_size=3), st.data())
def test_client_reads_every_valid_answer_however_it_is_cut(
    answers: list[tuple[bytes, int]], data: st.DataObject
) -> None:
    async def main() -> None:
        connection = Connection()
        transport: Any = FakeTransport()
        connection.connection_made(transport)
        for body, kind in answers:
            if kind == 0:
                wire = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            elif kind == 1:
                chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
                wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n"
            else:
                wire = b"HTTP/1.1 103 Hint\r\nA: b\r\n\r\nHTTP/1.1 200\nContent-Length: %d\n\n%b" % (len(body), body)
            head = asyncio.ensure_future(connection.request("GET", "/", [("Host", "x")]))
            await asyncio.sleep(0)
            cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=4)))
            for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True):
                if wire[a:b]:
                    connection.data_received(wire[a:b])
            assert await (await head).read() == body
            assert connection.reusable

    LOOP.run_until_complete(main())
