"""A small client of the agent: its process, plain HTTP requests, Connect calls and streams, all over loopback."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

TIMEOUT = 30.0  # seconds; an agent that hangs fails the test
JSON = {"Content-Type": "application/json"}
CONNECT_JSON = {"Content-Type": "application/connect+json"}
END = 0x02


@dataclass
class Answer:
    """Status, headers (lower-case names) and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def frame(message: Any, flags: int = 0) -> bytes:
    """One Connect frame; `message` is JSON unless it is bytes already."""
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def shell(script: str, **process: Any) -> dict[str, Any]:
    """StartRequest that runs `script` in a shell."""
    return {"process": {"cmd": "/bin/sh", "args": ["-c", script], **process}}


def basic(user: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}


def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Bytes of a whole POST request."""
    lines = [f"POST {path} HTTP/1.1", "Host: agent", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Stream:
    """A Connect stream whose request is one message."""

    def __init__(self, port: int, path: str, message: Any, headers: dict[str, str]) -> None:
        self.connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        self.connection.request("POST", path, frame(message), CONNECT_JSON | headers)
        self.response = self.connection.getresponse()
        self.end: dict[str, Any] | None = None

    def frames(self) -> Iterator[dict[str, Any]]:
        """Messages until the end of the stream, which is left in `end`."""
        assert self.response.status == 200, self.response.read()
        assert self.response.getheader("Content-Type") == "application/connect+json"
        while head := self.response.read(5):
            flags, length = struct.unpack(">BI", head)
            message = json.loads(self.response.read(length))
            if flags & END:
                self.end = message
                assert self.response.read() == b""
                return
            yield message

    def next(self) -> dict[str, Any]:
        return next(self.frames())

    @property
    def error(self) -> tuple[str, str]:
        """Code and message of a stream that must fail; reads it to its end."""
        for _ in self.frames():
            pass
        assert self.end is not None
        return self.end["error"]["code"], self.end["error"]["message"]

    def close(self) -> None:
        self.connection.close()
        self.response.close()


class ProcessStream(Stream):
    """Events of a process. Each stream gathers what it has read."""

    def __init__(self, port: int, path: str, message: Any, headers: dict[str, str]) -> None:
        super().__init__(port, path, message, headers)
        self.output = {"stdout": b"", "stderr": b"", "pty": b""}
        self.chunks: list[bytes] = []
        self.keepalives = 0
        self.ended: dict[str, Any] | None = None

    def start(self) -> int:
        """Reads the first event; returns the pid."""
        pid = self.next()["event"]["start"]["pid"]
        assert isinstance(pid, int)
        return pid

    def take(self, message: dict[str, Any]) -> None:
        event = message["event"]
        for kind, text in event.get("data", {}).items():
            self.chunks.append(base64.b64decode(text))
            self.output[kind] += self.chunks[-1]
        self.keepalives += "keepalive" in event
        self.ended = event.get("end", self.ended)

    def until(self, kind: str, wanted: bytes) -> None:
        """Reads on until `wanted` was in the output."""
        while wanted not in self.output[kind]:
            self.take(self.next())

    def finish(self) -> dict[str, Any]:
        """Reads to the end; returns the end event."""
        for message in self.frames():
            self.take(message)
        assert self.end == {}, self.end
        assert self.ended is not None
        return self.ended


class Agent:
    """An agent process on a free port of 127.0.0.1."""

    def __init__(
        self, binary: Path, *options: str, host: bool = True, system: bool = False, stderr: Path | None = None
    ) -> None:
        command = [str(binary), "--listen-port", "0", "--bind", "127.0.0.1", *options]
        if not system:
            command.append("--no-system")
        if host:
            command += ["--host-address", "127.0.0.1"]
        self.log = stderr
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(stderr.open("wb")) if stderr else None
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=target, text=True)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline().rsplit(" ", 1)[1])
        self.token: str | None = None

    def stop(self) -> None:
        """Ends it; it must have lived until now and leave without complaint."""
        assert self.process.poll() is None, self.errors()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(TIMEOUT)
        assert self.process.stdout
        self.process.stdout.close()
        assert status == 0, self.errors()

    def errors(self) -> str:
        return self.log.read_text() if self.log else ""

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))

    def _headers(self, headers: dict[str, str] | None) -> dict[str, str]:
        token = {"X-Access-Token": self.token} if self.token else {}
        return token | (headers or {})

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            connection.request(method, path, body, self._headers(headers))
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
        finally:
            connection.close()

    def init(self, **fields: Any) -> Answer:
        return self.request("POST", "/init", json.dumps(fields).encode(), JSON)

    def call(self, method: str, message: Any, headers: dict[str, str] | None = None) -> Any:
        """The answer of a unary call of process.Process that must succeed."""
        answer = self.unary(method, message, headers)
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"] == "application/json"
        return answer.json

    def unary(self, method: str, message: Any, headers: dict[str, str] | None = None) -> Answer:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        return self.request("POST", f"/process.Process/{method}", body, JSON | (headers or {}))

    def failure(self, method: str, message: Any) -> tuple[int, str, str]:
        """Status, code and message of a unary call that must fail."""
        answer = self.unary(method, message)
        return answer.status, answer.json["code"], answer.json["message"]

    def start(self, message: Any, headers: dict[str, str] | None = None) -> ProcessStream:
        return ProcessStream(self.port, "/process.Process/Start", message, self._headers(headers))

    def connect(self, headers: dict[str, str] | None = None, **selector: Any) -> ProcessStream:
        return ProcessStream(self.port, "/process.Process/Connect", {"process": selector}, self._headers(headers))

    def run(self, script: str, headers: dict[str, str] | None = None, **process: Any) -> ProcessStream:
        """Runs a shell script to its end."""
        stream = self.start(shell(script, **process), headers)
        stream.start()
        stream.finish()
        stream.close()
        return stream

    def stdin(self, pid: int, data: bytes, kind: str = "stdin") -> Answer:
        text = base64.b64encode(data).decode()
        return self.unary("SendInput", {"process": {"pid": pid}, "input": {kind: text}})

    def raw(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)
        connection.sendall(data)
        return connection

    def exchange(self, data: bytes) -> bytes:
        """All that comes back for `data` until the agent closes; our direction is not ended."""
        with self.raw(data) as connection:
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def statuses(data: bytes) -> list[int]:
    """Status codes of the responses in a byte stream without bodies that look like one."""
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]
