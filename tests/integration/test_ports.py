"""Servers inside a guest, seen from outside: any port, by header and by host name, as the lines are written."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any
from urllib.parse import urlsplit

import pytest
from e2b import Sandbox, TimeoutException

from aenv.agent.client import ENVD_PORT
from aenv.agent.process import Ended, Output, Processes, Started
from aenv.http.client import ClientResponse, Connection
from tests.integration.conftest import PATIENCE, Daemon

pytestmark = pytest.mark.vm

CODE_PORT = 49999  # where the code interpreter's template listens
STREAMS = 300
KEEPALIVES = 3

# Answers /run with two lines, the second only after somebody has asked for /go: a reader that gets the first line
# before it asks has proof that nothing on the way waited for more.
INTERPRETER = """
import socket, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

go = threading.Event()

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/go":
            go.set()
        self.answer(b"host " + self.headers["Host"].encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.line(b'{"type": "stdout", "text": "one"}\\n')
        go.wait()
        self.line(b'{"type": "stdout", "text": "two"}\\n')
        self.wfile.write(b"0\\r\\n\\r\\n")

    def answer(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def line(self, content):
        self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(content), content))
        self.wfile.flush()

    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    daemon_threads = True
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET

server = Server((sys.argv[1], int(sys.argv[2])), Handler)
print("listening", flush=True)
server.serve_forever()
"""


class Client:
    """One sandbox behind the daemon's address."""

    def __init__(self, daemon: Daemon, box: Sandbox) -> None:
        self.id = box.sandbox_id
        self.authority = urlsplit(daemon.url).netloc
        _, answer = daemon.request("POST", f"/v2/sandboxes/{self.id}/connect", {"timeout": 300})
        self._token: str = answer["envdAccessToken"]

    def name(self, port: int) -> str:
        return f"{port}-{self.id}.sandboxes.test"

    async def open(self) -> Connection:
        host, _, port = self.authority.rpartition(":")
        return await Connection.open(socket.socket(), (host, int(port)), timeout=PATIENCE)

    def headers(self, port: int, by_host: bool = False) -> dict[str, str]:
        if by_host:
            return {"Host": self.name(port)}
        return {"Host": self.authority, "E2b-Sandbox-Id": self.id, "E2b-Sandbox-Port": str(port)}

    @asynccontextmanager
    async def ask(
        self, port: int, method: str, path: str, body: bytes | None = None, *, by_host: bool = False, **more: str
    ) -> AsyncIterator[ClientResponse]:
        with closing(await self.open()) as connection:
            fields = self.headers(port, by_host) | {k.replace("_", "-"): v for k, v in more.items()}
            yield await connection.request(method, path, fields.items(), body)

    async def get(self, port: int, path: str = "/", *, by_host: bool = False) -> tuple[int, bytes]:
        async with self.ask(port, "GET", path, by_host=by_host) as response:
            return response.status, await response.read()

    @property
    def processes(self) -> Processes:
        return Processes(self.open, self.headers(ENVD_PORT) | {"X-Access-Token": self._token})

    async def stream(self, method: str, request: Any, **more: str) -> AsyncIterator[dict[str, Any]]:
        """The messages of a Connect stream, all kinds, the closing one too."""
        body = json.dumps(request).encode()
        more |= {"X_Access_Token": self._token, "Content_Type": "application/connect+json"}
        frame = struct.pack(">BI", 0, len(body)) + body
        async with self.ask(ENVD_PORT, "POST", f"/process.Process/{method}", frame, **more) as response:
            assert response.status == 200
            buffer = b""
            async for piece in response.body:
                buffer += piece
                while len(buffer) >= 5 and len(buffer) >= (end := 5 + int.from_bytes(buffer[1:5])):
                    yield json.loads(buffer[5:end])
                    buffer = buffer[end:]


@pytest.fixture
def client(daemon: Daemon, box: Sandbox) -> Client:
    return Client(daemon, box)


@asynccontextmanager
async def server(client: Client, address: str, port: int) -> AsyncIterator[None]:
    """The little server, running in the guest."""
    events = client.processes.start("/usr/bin/python3", ["-c", INTERPRETER, address, str(port)])
    said, pid = b"", 0
    async for event in events:
        assert not isinstance(event, Ended), f"{event} {said!r}"
        if isinstance(event, Started):
            pid = event.pid
        else:
            said += event.data
        if b"listening\n" in said:
            break
    try:
        yield
    finally:
        await client.processes.signal(pid, "SIGNAL_SIGKILL")
        async for _ in events:
            pass  # until it has ended


async def lines(response: ClientResponse) -> AsyncIterator[dict[str, Any]]:
    buffer = b""
    async for piece in response.body:
        *whole, buffer = (buffer + piece).split(b"\n")
        for line in whole:
            yield json.loads(line)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_every_way_to_listen_is_reachable(client: Client, address: str) -> None:
    """Also a server on the guest's loopback only, where no packet from outside goes."""

    async def closed(port: int) -> None:
        status, answer = await client.get(port)
        assert (status, json.loads(answer)["message"]) == (502, "The sandbox is running but port is not open")

    async def main() -> None:
        await closed(8080)
        async with server(client, address, 8080):
            for _ in range(3):  # a fresh connection, then kept ones
                assert await client.get(8080) == (200, b"host " + client.authority.encode())
            await closed(8081)
        await closed(8080)

    asyncio.run(main())


@pytest.mark.parametrize("by_host", [False, True], ids=["by header", "by host"])
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_code_interpreter_answers_line_by_line(client: Client, address: str, by_host: bool) -> None:
    async def main() -> None:
        async with server(client, address, CODE_PORT):
            body = json.dumps({"code": "print('one')"}).encode()
            async with client.ask(CODE_PORT, "POST", "/execute", body, by_host=by_host) as response:
                assert response.status == 200
                arriving = lines(response)
                assert (await anext(arriving))["text"] == "one"
                host = client.name(CODE_PORT) if by_host else client.authority
                assert await client.get(CODE_PORT, "/go", by_host=by_host) == (200, b"host " + host.encode())
                assert [line["text"] async for line in arriving] == ["two"]

    asyncio.run(main())


def test_a_silent_stream_says_that_it_lives(client: Client) -> None:
    """Frames of no content, at the interval the client names, until the process ends by itself."""

    async def main() -> None:
        seen: list[str] = []
        pid = 0
        start = {"process": {"cmd": "/bin/cat"}}
        async for message in client.stream("Start", start, Keepalive_Ping_Interval="1"):
            event = message.get("event", {"closing": None})
            seen += event
            pid = event.get("start", {"pid": pid})["pid"]
            if seen.count("keepalive") == KEEPALIVES and seen[-1] == "keepalive":
                await client.processes.close_stdin(pid)
        assert seen[0] == "start"
        assert seen[-2:] == ["end", "closing"]
        assert set(seen[1:-2]) == {"keepalive"}

    asyncio.run(main())


def test_a_kill_cuts_streams_so_that_the_sdk_knows_why(daemon: Daemon) -> None:
    """It looks whether the sandbox is gone only after a reset."""
    sandbox = daemon.create()
    command = sandbox.commands.run("sleep 60", background=True)
    sandbox.kill()
    with pytest.raises(TimeoutException, match="was killed or reached its end of life"):
        command.wait()


def test_hundreds_of_streams_at_a_time(client: Client) -> None:
    """All are open before the first gets its input; each gets its own and nothing else."""

    async def main() -> None:
        processes = client.processes
        opened: set[int] = set()
        all_open = asyncio.Event()

        async def one(number: int) -> bytes:
            output = b""
            async for event in processes.start("/bin/cat", [], stdin=True):
                if isinstance(event, Started):
                    opened.add(event.pid)
                    if len(opened) == STREAMS:
                        all_open.set()
                    await all_open.wait()
                    await processes.send_input(event.pid, b"%d" % number, pty=False)
                    await processes.close_stdin(event.pid)
                elif isinstance(event, Output):
                    output += event.data
                else:
                    assert event == Ended(0, "exit status 0")
            return output

        outputs = await asyncio.gather(*(one(number) for number in range(STREAMS)))
        assert outputs == [b"%d" % number for number in range(STREAMS)]

    asyncio.run(main())
