from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from aenv.api.app import Api
from aenv.api.auth import ApiKey
from aenv.http.server import Server
from tests.api.fake import FakeService

KEY = "e2b_" + "0123456789abcdef" * 2 + "01234567"
MAX_TIMEOUT = 86400


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Node:
    """The API on a real server in a thread, and a plain client for it."""

    service: FakeService
    loop: asyncio.AbstractEventLoop
    port: int
    headers: dict[str, str] = field(default_factory=lambda: {"X-API-Key": KEY})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, key: bool = True
    ) -> Answer:
        """`body` is sent as it is when it is bytes, else as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, data, (self.headers if key else {}) | dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def refused(self, status: int, method: str, path: str, body: Any = None, **more: Any) -> str:
        """Expect an error in the form the SDKs parse; gives its message."""
        answer = self.call(method, path, body, **more)
        assert answer.status == status, answer.body
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.json["code"] == status
        message: str = answer.json["message"]
        assert message
        return message


@pytest.fixture
def node() -> Iterator[Node]:
    loop = asyncio.new_event_loop()
    service = FakeService()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Server:
        return await Server.start(Api(service, ApiKey(KEY), max_timeout=MAX_TIMEOUT))

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield Node(service, loop, server.port)
    finally:
        asyncio.run_coroutine_threadsafe(server.close(1), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
