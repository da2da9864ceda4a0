"""An HTTP server on loopback that answers range requests, and can be as bad as servers are."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """What the server does; tests change it while it runs."""

    blob: bytes
    delay: float = 0.0  # seconds before each answer
    hold: threading.Event | None = None  # no answer before it is set
    faults: list[str] = field(default_factory=list)  # one for each of the next requests
    always: str = ""  # for all others
    token: str | None = None  # what a request must bring; given out by /token
    token_seconds: int = 300
    password: str | None = None  # /token wants Basic user:password
    redirect: str | None = None  # where /blob sends to
    requests: list[tuple[str, int, int]] = field(default_factory=list)  # path, first and last byte
    seen: list[dict[str, str]] = field(default_factory=list)  # headers
    tokens_given: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ranges(self) -> list[tuple[int, int]]:
        with self.lock:
            return [(first, last) for path, first, last in self.requests if path != "/token"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: Behaviour

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        b = self.behaviour
        path = self.path.partition("?")[0]
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(match[1]), int(match[2])) if match else (0, len(b.blob) - 1)
        with b.lock:
            b.requests.append((path, first, last))
            b.seen.append(dict(self.headers))
            fault = b.faults.pop(0) if b.faults and path != "/token" else b.always if path != "/token" else ""
        if path == "/token":
            self._give_token()
            return
        if b.hold is not None:
            b.hold.wait(30)
        if b.delay:
            time.sleep(b.delay)
        if b.token is not None and path != "/storage" and self.headers.get("Authorization") != f"Bearer {b.token}":
            where = f"http://127.0.0.1:{self.server.server_address[1]}/token"
            challenge = f'Bearer realm="{where}",service="test",scope="repository:x:pull"'
            self._answer(401, b"", {"WWW-Authenticate": challenge})
        elif path == "/storage" and "Authorization" in self.headers:
            self._answer(400, b"no token here", {})
        elif b.redirect is not None and path == "/blob":
            self._answer(307, b"", {"Location": b.redirect})
        else:
            self._range(first, last, fault)

    def _give_token(self) -> None:
        b = self.behaviour
        wanted = "Basic " + base64.b64encode(f"user:{b.password}".encode()).decode()
        if b.password is not None and self.headers.get("Authorization") != wanted:
            self._answer(401, b"", {})
            return
        b.tokens_given += 1
        body = json.dumps({"token": b.token, "expires_in": b.token_seconds}).encode()
        self._answer(200, body, {"Content-Type": "application/json"})

    def _range(self, first: int, last: int, fault: str) -> None:
        b = self.behaviour
        body = b.blob[first : last + 1]
        given = {"Content-Range": f"bytes {first}-{last}/{len(b.blob)}"}
        match fault:
            case "":
                self._answer(206, body, given)
            case "cut":  # the connection ends in the middle
                self._answer(206, body, given, send=body[: len(body) // 2])
                self.close_connection = True
            case "short":  # an answer that is whole, of fewer bytes
                self._answer(206, body[:-1], {"Content-Range": f"bytes {first}-{last - 1}/{len(b.blob)}"})
            case "shifted":
                other = b.blob[first + 512 : last + 513]
                self._answer(206, other, {"Content-Range": f"bytes {first + 512}-{last + 512}/{len(b.blob)}"})
            case "other size":
                self._answer(206, body, {"Content-Range": f"bytes {first}-{last}/{len(b.blob) + 1}"})
            case "no content-range":
                self._answer(206, body, {})
            case "whole":  # a server that knows no ranges
                self._answer(200, b.blob, {})
            case "wrong":  # right form, wrong bytes
                self._answer(206, bytes(x ^ 0x55 for x in body), given)
            case "encoded":
                self._answer(206, body, given | {"Content-Encoding": "gzip"})
            case "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                self.close_connection = True
            case "drip":  # so slowly that no time-out of a socket sees it
                self._answer(206, body, given, send=b"")
                for at in range(0, len(body), 100):
                    self.wfile.write(body[at : at + 100])
                    self.wfile.flush()
                    time.sleep(0.05)
            case _:
                self._answer(int(fault), b"", {"Retry-After": "0"} if fault == "503" else {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str], send: bytes | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if send is None else send)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away in the middle of answers here."""


@contextmanager
def serve(blob: bytes, **options: Any) -> Iterator[tuple[str, Behaviour]]:
    """The address of the blob, and how the server behaves."""
    behaviour = Behaviour(blob, **options)
    handler = type("Handler", (_Handler,), {"behaviour": behaviour})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/blob", behaviour
    finally:
        if behaviour.hold is not None:
            behaviour.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def refusing() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/blob"


@contextmanager
def silent() -> Iterator[str]:
    """An address where connections are taken and never answered."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/blob"
