"""What a handler sees of HTTP: requests, responses, headers and the error that becomes a JSON answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from aenv.errors import AenvError

if TYPE_CHECKING:
    from aenv.http.body import Body
    from aenv.http.stream import Stream

T = TypeVar("T")

DEFAULT_JSON_LIMIT = 4 * 1024 * 1024  # bytes of a JSON request body


class HttpError(AenvError):
    """Answer the request with `status` and the JSON body `{"code": status, "message": message}`."""

    def __init__(self, status: int, message: str, *, headers: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = tuple(headers)


class ClientDisconnectedError(AenvError):
    """The client closed its connection before the exchange was complete."""

    def __init__(self) -> None:
        super().__init__("the client closed the connection")


class Headers:
    """Header fields in order, duplicates kept, looked up without regard to case."""

    __slots__ = ("_index", "_items")

    def __init__(self, items: Iterable[tuple[str, str]] = ()) -> None:
        self._items = list(items)
        self._index: dict[str, list[str]] | None = None

    def _lookup(self) -> dict[str, list[str]]:
        index = self._index
        if index is None:
            index = self._index = {}
            for name, value in self._items:
                index.setdefault(name.lower(), []).append(value)
        return index

    def get(self, name: str) -> str | None:
        """The first value of `name`, or None."""
        values = self._lookup().get(name.lower())
        return values[0] if values else None

    def get_all(self, name: str) -> list[str]:
        """All values of `name`, in order."""
        return list(self._lookup().get(name.lower(), ()))

    def tokens(self, name: str) -> list[str]:
        """The comma-separated tokens of all fields `name`, lower-case (RFC 9110 §5.6.1)."""
        found = self._lookup().get(name.lower())
        if not found:
            return []
        return [token for value in found for part in value.split(",") if (token := part.strip().lower())]

    def add(self, name: str, value: str) -> None:
        """Append a field."""
        self._items.append((name, value))
        self._index = None

    def set(self, name: str, value: str) -> None:
        """Replace all fields `name` by one."""
        self.remove(name)
        self.add(name, value)

    def remove(self, name: str) -> None:
        """Drop all fields `name`."""
        low = name.lower()
        self._items = [item for item in self._items if item[0].lower() != low]
        self._index = None

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._lookup()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Headers({self._items!r})"


def _decode(text: str, what: str) -> str:
    if "%" not in text and text.isascii():
        return text
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError as error:
        raise HttpError(400, f"{what}: not valid UTF-8 after percent-decoding") from error


class Request:
    """One request. The body is read by exactly one of `read`, `json` and iteration.

    `path` and `query_string` are as sent, undecoded; `segments` and `query` are decoded *after* splitting, so that an
    encoded slash (`%2F`) stays inside its segment. `peer` is the client's address, `scheme` is `http` or `https`.
    """

    __slots__ = (
        "_disconnect_callbacks",
        "_query",
        "_segments",
        "body",
        "disconnected",
        "headers",
        "method",
        "path",
        "peer",
        "query_string",
        "scheme",
        "target",
        "upgrade",
        "version",
    )

    def __init__(
        self,
        method: str,
        target: str,
        headers: Headers,
        *,
        version: str = "1.1",
        body: Body | None = None,
        peer: str = "",
        scheme: str = "http",
        upgrade: str | None = None,
    ) -> None:
        self.method = method
        self.target = target  # path and query as sent
        self.path, _, self.query_string = target.partition("?")
        self.headers = headers
        self.version = version
        self.body = body
        self.peer = peer
        self.scheme = scheme
        self.upgrade = upgrade  # protocol the client offers to switch to, or None
        self.disconnected = False
        self._segments: tuple[str, ...] | None = None
        self._query: list[tuple[str, str]] | None = None
        self._disconnect_callbacks: list[Callable[[], None]] = []

    @property
    def segments(self) -> tuple[str, ...]:
        """Decoded path segments: `/a%2Fb/c` gives `("a/b", "c")`. Raises HttpError 400 for bad UTF-8."""
        if self._segments is None:
            parts = self.path.split("/")[1:]
            self._segments = tuple(_decode(part, "path") for part in parts)
        return self._segments

    @property
    def query(self) -> list[tuple[str, str]]:
        """Decoded query parameters, in order. Raises HttpError 400 for bad UTF-8."""
        if self._query is None:
            pairs = []
            for part in self.query_string.split("&"):
                if part:
                    name, _, value = part.replace("+", " ").partition("=")
                    pairs.append((_decode(name, "query"), _decode(value, f"query parameter {name[:64]}")))
            self._query = pairs
        return self._query

    def query_one(self, name: str) -> str | None:
        """The value of parameter `name`, None when absent. Raises HttpError 400 when given twice."""
        values = [value for key, value in self.query if key == name]
        if len(values) > 1:
            raise HttpError(400, f"{name}: given more than once")
        return values[0] if values else None

    async def read(self, limit: int, *, timeout: float = 30) -> bytes:
        """The whole body, at most `limit` bytes, within `timeout` seconds. Raises HttpError 413 and 408,
        ClientDisconnectedError."""
        if self.body is None:
            return b""
        if self.body.complete:
            return await self.body.read(limit)
        try:
            async with asyncio.timeout(timeout):
                return await self.body.read(limit)
        except TimeoutError as error:
            raise HttpError(408, "body: not received in time") from error

    async def json(self, type: type[T], *, limit: int = DEFAULT_JSON_LIMIT, empty: bytes = b"") -> T:
        """The body decoded from JSON into `type`; `empty` stands for an empty body. Raises HttpError 400 naming the
        field, 413, 408."""
        return decode_json(await self.read(limit) or empty, type)

    async def stream(self) -> AsyncIterator[bytes]:
        """The body in the pieces in which it arrives; the client is held back when the handler is slow. No time-out:
        a body may be a long-lived stream. Raises HttpError 400 (bad chunk) and ClientDisconnectedError."""
        if self.body is not None:
            async for chunk in self.body:
                yield chunk

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` once if the client goes away before the answer is complete (at once if it is gone)."""
        if self.disconnected:
            callback()
        else:
            self._disconnect_callbacks.append(callback)

    def notify_disconnect(self) -> None:
        """For the server: the client is gone."""
        if not self.disconnected:
            self.disconnected = True
            callbacks, self._disconnect_callbacks = self._disconnect_callbacks, []
            for callback in callbacks:
                callback()


def decode_json(data: bytes, type: type[T]) -> T:
    """Decode JSON into a msgspec type. Raises HttpError 400 naming the field."""
    try:
        return msgspec.json.decode(data, type=type)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `")
        field = where.rstrip("`").removeprefix("$").removeprefix(".")
        raise HttpError(400, f"{field}: {message}" if field else message) from error
    except msgspec.DecodeError as error:
        raise HttpError(400, f"body: not valid JSON: {error}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, "body: not valid JSON") from error


ResponseBody = bytes | AsyncIterator[bytes] | None


class Response:
    """An answer. `body` is all bytes, None, or an iterator whose pieces are sent at once, one by one; the server calls
    its `aclose` when it has one, whether or not it was iterated. Framing headers are the server's business, except
    that `Content-Length` may be given for an iterator or for HEAD."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self, status: int, body: ResponseBody = None, headers: Iterable[tuple[str, str]] | Headers = ()
    ) -> None:
        self.status = status
        self.body = body
        self.headers = headers if isinstance(headers, Headers) else Headers(headers)

    @classmethod
    def json(cls, status: int, value: Any, headers: Iterable[tuple[str, str]] = ()) -> Response:
        """`value` encoded by msgspec."""
        return cls(status, msgspec.json.encode(value), [("Content-Type", "application/json"), *headers])

    @classmethod
    def error(cls, status: int, message: str, headers: Iterable[tuple[str, str]] = ()) -> Response:
        """The error body both SDKs parse: `{"code", "message"}`."""
        return cls.json(status, {"code": status, "message": message}, headers)


class UpgradeResponse(Response):
    """101: the server answers, hands the raw connection to `run`, and closes it when `run` returns."""

    __slots__ = ("run",)

    def __init__(self, headers: Iterable[tuple[str, str]] | Headers, run: Callable[[Stream], Awaitable[None]]) -> None:
        super().__init__(101, None, headers)
        self.run = run


Handler = Callable[[Request], Awaitable[Response]]
