"""Message heads: bytes to fields by llhttp (httptools) with the checks that keep framing unambiguous, and back.

Only a complete head, up to its empty line, is ever parsed; bodies are framed by `aenv.http.body`. Refused on purpose,
because two parsers could disagree on them: bare CR or LF, folded lines, both or repeated Content-Length and
Transfer-Encoding, any transfer coding but `chunked`, a second Host (RFC 9112 §§2.2, 3.2, 5.2, 6).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus

import httptools
from httptools.parser.errors import HttpParserError, HttpParserUpgrade

from aenv.errors import AenvError
from aenv.http.message import Headers, HttpError

CHUNKED = -1  # body length of a message framed by Transfer-Encoding: chunked
UNTIL_CLOSE = -2  # body length of a response that ends with the connection

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+ ")
_TARGET = re.compile(r"[\x21\x22\x24-\x7e]+")  # visible ASCII without '#'
_ABSOLUTE = re.compile(r"https?://([^/?]*)(.*)", re.IGNORECASE)
_HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%:\[\]\-]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class ProtocolError(AenvError):
    """The peer of a client connection broke HTTP."""


@dataclass(slots=True)
class RequestHead:
    """`length` is the body's length in bytes, 0 for none, or CHUNKED."""

    method: str
    target: str  # origin form: path and query
    version: str
    headers: Headers
    length: int
    keep_alive: bool
    upgrade: str | None
    expect_continue: bool


@dataclass(slots=True)
class ResponseHead:
    """`length` as the fields say, before the rules for HEAD, 1xx, 204 and 304."""

    status: int
    version: str
    headers: Headers
    length: int
    keep_alive: bool
    upgrade: bool


class _Collector:
    """Receives llhttp's callbacks for one head."""

    __slots__ = ("complete", "fields", "target")

    def __init__(self) -> None:
        self.target = b""
        self.fields: list[tuple[str, str]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.decode("latin-1"), value.decode("latin-1").strip(" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


def _feed(parser: httptools.HttpRequestParser | httptools.HttpResponseParser, head: bytes) -> None:
    # Length and coding are judged below, with better messages; llhttp must not stop at them.
    parser.set_dangerous_leniencies(lenient_chunked_length=True, lenient_transfer_encoding=True)
    try:
        parser.feed_data(head)
    except HttpParserUpgrade:
        pass  # llhttp stops after a head that offers or accepts an upgrade; the head itself is complete


def _line_ends_are_strict(head: bytes) -> bool:
    ends = head.count(b"\r\n")
    return head.count(b"\n") == ends and head.count(b"\r") == ends


def parse_request_head(head: bytes, *, max_headers: int, max_target: int) -> RequestHead:
    """Parse a head that ends with its empty line. Raises HttpError 400, 414, 417, 431, 501, 505."""
    if not _line_ends_are_strict(head):
        raise HttpError(400, "request head: line does not end with CRLF")
    seen = _Collector()
    parser = httptools.HttpRequestParser(seen)
    try:
        _feed(parser, head)
    except HttpParserError as error:
        raise _request_error(head, error) from error
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise HttpError(505, f"HTTP version {version} is not supported")
    method = parser.get_method().decode("latin-1")
    if method == "CONNECT":
        raise HttpError(501, "method CONNECT is not supported")
    # llhttp accepts several spaces between the parts of the request line; RFC 9112 §3 allows one.
    if not seen.complete or not head.startswith(b"%s %s HTTP/" % (method.encode("latin-1"), seen.target)):
        raise HttpError(400, "request line: malformed")
    if len(seen.target) > max_target:
        raise HttpError(414, f"request target: longer than {max_target} bytes")
    if len(seen.fields) > max_headers:
        raise HttpError(431, f"more than {max_headers} header fields")
    headers = Headers(seen.fields)
    _check_host(headers, version)
    target = _origin_form(method, seen.target.decode("latin-1"), headers)
    connection = headers.tokens("connection")
    return RequestHead(
        method=method,
        target=target,
        version=version,
        headers=headers,
        length=_request_length(headers, version),
        keep_alive="close" not in connection and (version == "1.1" or "keep-alive" in connection),
        upgrade=headers.get("upgrade") if version == "1.1" and "upgrade" in connection else None,
        expect_continue=_expects_continue(headers, version),
    )


def _request_error(head: bytes, error: Exception) -> HttpError:
    reason = str(error)
    if "Invalid method" in reason and _METHOD.match(head):
        return HttpError(501, "method is not supported")
    if "HTTP version" in reason:
        return HttpError(505, "HTTP version is not supported")
    return HttpError(400, f"request head: {reason[:1].lower()}{reason[1:]}")


def _origin_form(method: str, target: str, headers: Headers) -> str:
    """The target as path and query. For the absolute form its authority replaces Host (RFC 9112 §3.2.2)."""
    if not _TARGET.fullmatch(target):
        raise HttpError(400, "request target: invalid character")
    if target.startswith("/") or (target == "*" and method == "OPTIONS"):
        return target
    match = _ABSOLUTE.fullmatch(target)
    if match is None or not match[1] or not _HOST.fullmatch(match[1]):
        raise HttpError(400, "request target: neither a path nor a URL")
    headers.set("Host", match[1])
    return match[2] if match[2].startswith("/") else "/" + match[2]


def _check_host(headers: Headers, version: str) -> None:
    hosts = headers.get_all("host")
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise HttpError(400, "Host: exactly one is required")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise HttpError(400, "Host: malformed")


def _request_length(headers: Headers, version: str) -> int:
    lengths = headers.get_all("content-length")
    codings = headers.get_all("transfer-encoding")
    if codings:
        if lengths:
            raise HttpError(400, "both Content-Length and Transfer-Encoding are given")
        if len(codings) > 1 or codings[0].lower() != "chunked":
            raise HttpError(501, "Transfer-Encoding: only chunked is supported")
        if version != "1.1":
            raise HttpError(400, "Transfer-Encoding: not allowed in HTTP/1.0")
        return CHUNKED
    if not lengths:
        return 0
    if len(lengths) > 1 or not _DIGITS.fullmatch(lengths[0]):
        raise HttpError(400, "Content-Length: expected one whole number")
    return int(lengths[0])


def _expects_continue(headers: Headers, version: str) -> bool:
    expectations = headers.tokens("expect")
    if not expectations or version != "1.1":
        return False
    if expectations != ["100-continue"]:
        raise HttpError(417, "Expect: only 100-continue is supported")
    return True


def parse_response_head(head: bytes) -> ResponseHead:
    """Parse a head that ends with its empty line. Raises ProtocolError.

    Bare LF is accepted as the end of a line, as many hand-written servers send it: there is one reader of this
    connection, and what is passed on is written anew.
    """
    if not _line_ends_are_strict(head):
        head = head.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    seen = _Collector()
    parser = httptools.HttpResponseParser(seen)
    try:
        _feed(parser, head)
    except HttpParserError as error:
        raise ProtocolError(f"response head: {error}") from error
    version = parser.get_http_version()
    if not seen.complete or version not in ("1.1", "1.0"):
        raise ProtocolError("response head: malformed")
    headers = Headers(seen.fields)
    connection = headers.tokens("connection")
    length = _response_length(headers)
    return ResponseHead(
        status=parser.get_status_code(),
        version=version,
        headers=headers,
        length=length,
        keep_alive="close" not in connection and (version == "1.1" or "keep-alive" in connection),
        upgrade="upgrade" in headers,
    )


def _response_length(headers: Headers) -> int:
    lengths = headers.get_all("content-length")
    codings = headers.get_all("transfer-encoding")
    if codings:
        if lengths or len(codings) > 1 or codings[0].lower() != "chunked":
            raise ProtocolError("response head: unsupported Transfer-Encoding")
        return CHUNKED
    if not lengths:
        return UNTIL_CLOSE
    if len(lengths) > 1 or not _DIGITS.fullmatch(lengths[0]):
        raise ProtocolError("response head: bad Content-Length")
    return int(lengths[0])


@lru_cache(maxsize=1024)
def _is_token(name: str) -> bool:
    return _TOKEN.fullmatch(name) is not None


def encode_fields(fields: Iterable[tuple[str, str]]) -> str:
    """Header lines. Raises ValueError when a name or value would break out of its line (response splitting)."""
    lines = []
    for name, value in fields:
        if not _is_token(name):
            raise ValueError(f"invalid header name {name!r}")
        lines.append(f"{name}: {value}\r\n")
    text = "".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines) or _CONTROL.search(text):
        raise ValueError("header value with a control character")
    return text


def encode_response_head(status: int, fields: Iterable[tuple[str, str]]) -> bytes:
    """Raises ValueError for header fields that cannot be sent."""
    return f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n{encode_fields(fields)}\r\n".encode("latin-1")


def encode_request_head(method: str, target: str, fields: Iterable[tuple[str, str]]) -> bytes:
    """Raises ValueError for a method, target or header field that cannot be sent."""
    if not _is_token(method) or not _TARGET.fullmatch(target):
        raise ValueError(f"invalid method or target: {method!r} {target[:100]!r}")
    return f"{method} {target} HTTP/1.1\r\n{encode_fields(fields)}\r\n".encode("latin-1")
