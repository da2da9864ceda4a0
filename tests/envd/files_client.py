"""A small client of the agent's file interfaces: plain HTTP requests, raw bytes, and the filesystem service."""

from __future__ import annotations

import base64
import json
import os
import pwd
import socket
import struct
from collections.abc import Iterable, Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import quote, urlencode

TIMEOUT = 30.0  # seconds; an agent that hangs fails the test
OCTET_STREAM = {"Content-Type": "application/octet-stream"}
BOUNDARY = "----boundary-of-a-test"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


class Answer:
    """Status, headers (lower-case names) and body."""

    def __init__(self, response: HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class FilesClient:
    """Requests in the name of `user`, who by default is the one that runs the tests, so that chown works for all."""

    def __init__(self, port: int, user: str | None = None) -> None:
        self.port = port
        self.user = user or pwd.getpwuid(os.geteuid()).pw_name

    def as_user(self, user: str) -> FilesClient:
        return FilesClient(self.port, user)

    def request(
        self,
        method: str,
        target: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """An iterable body goes out chunked, one chunk for each item."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            chunked = not isinstance(body, bytes | None)
            connection.request(method, target, body, headers or {}, encode_chunked=chunked)
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def target(self, path: str | bytes | None, **query: str) -> str:
        query = {"username": self.user} | query
        named = "" if path is None else f"path={quote(path, safe='')}&"
        return f"/files?{named}{urlencode(query)}"

    def get(self, path: str | bytes, method: str = "GET", **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.request(method, self.target(path), headers=named)

    def post(
        self, path: str | bytes | None, body: bytes | Iterable[bytes], headers: dict[str, str] | None = None
    ) -> Answer:
        headers = OCTET_STREAM | (headers or {})
        if not isinstance(body, bytes):
            headers["Transfer-Encoding"] = "chunked"
        return self.request("POST", self.target(path), body, headers)

    def raw(self, data: bytes) -> socket.socket:
        """A connection on which `data` has been sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)
        connection.sendall(data)
        return connection

    def _rpc_headers(self, content_type: str) -> dict[str, str]:
        credentials = base64.b64encode(f"{self.user}:".encode()).decode()
        return {"Content-Type": content_type, "Authorization": f"Basic {credentials}", "Connect-Protocol-Version": "1"}

    def rpc(self, method: str, **message: Any) -> Answer:
        body = json.dumps(message).encode()
        return self.request("POST", f"/filesystem.Filesystem/{method}", body, self._rpc_headers("application/json"))

    def call(self, method: str, **message: Any) -> Any:
        """The answer of a call that must succeed."""
        answer = self.rpc(method, **message)
        assert answer.status == 200, answer.body
        return answer.json

    def failure(self, method: str, **message: Any) -> str:
        """The Connect code of a call that must fail."""
        answer = self.rpc(method, **message)
        assert answer.status >= 400, answer.body
        assert answer.json["message"]
        code: str = answer.json["code"]
        return code

    def stream(self, method: str, **message: Any) -> Stream:
        return Stream(self.port, method, message, self._rpc_headers("application/connect+json"))


class Stream:
    """A server stream of the filesystem service."""

    def __init__(self, port: int, method: str, message: dict[str, Any], headers: dict[str, str]) -> None:
        self.connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        body = json.dumps(message).encode()
        frame = struct.pack(">BI", 0, len(body)) + body
        self.connection.request("POST", f"/filesystem.Filesystem/{method}", frame, headers)
        self.response = self.connection.getresponse()

    def frames(self) -> Iterator[tuple[int, Any]]:
        """Flags and message of each frame."""
        while head := self.response.read(5):
            flags, length = struct.unpack(">BI", head)
            yield flags, json.loads(self.response.read(length))

    def close(self) -> None:
        self.connection.close()


def part(filename: str, content: bytes, field: str = "file") -> bytes:
    return b'--%b\r\nContent-Disposition: form-data; name="%b"; filename="%b"\r\n\r\n%b\r\n' % (
        BOUNDARY.encode(), field.encode(), filename.encode(), content,
    )  # fmt: skip


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--%b--\r\n" % BOUNDARY.encode()
