"""GET /dial: a raw connection to a port of the guest."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.envd.client import TIMEOUT, Agent, read_all

HEAD = "GET /dial?port={} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: aenv-dial\r\n\r\n"


class Server:
    """Serves each connection on a port of loopback with `handle`."""

    def __init__(self, handle: Callable[[socket.socket], None], address: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address, 0), family=family)
        self.port: int = self.listener.getsockname()[1]
        self.handle = handle
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            connection.settimeout(TIMEOUT)
            with connection:
                self.handle(connection)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(TIMEOUT)


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    servers: list[Server] = []

    def start(handle: Callable[[socket.socket], None], address: str = "127.0.0.1") -> int:
        servers.append(Server(handle, address))
        return servers[-1].port

    yield start
    for server in servers:
        server.close()


def dial(agent: Agent, port: int, early: bytes = b"") -> socket.socket:
    """A connection behind the 101."""
    connection = agent.raw(HEAD.format(port).encode() + early)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        assert byte, head
        head += byte
    assert head.startswith(b"HTTP/1.1 101 "), head
    assert b"upgrade: aenv-dial\r\n" in head.lower()
    return connection


def echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_dial_reaches_both_loopbacks(agent: Agent, serve: Callable[..., int], address: str) -> None:
    with dial(agent, serve(echo, address)) as connection:
        connection.sendall(b"ping")
        assert connection.recv(10) == b"ping"


def test_bytes_behind_the_request_are_the_ports(agent: Agent, serve: Callable[..., int]) -> None:
    with dial(agent, serve(echo), early=b"GET / early") as connection:
        assert connection.recv(100) == b"GET / early"


def test_dial_behind_other_requests(agent: Agent, serve: Callable[..., int]) -> None:
    """All in one piece: the tunnel gets what follows the request, no more and no less."""
    health = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    with agent.raw(health * 3 + HEAD.format(serve(echo)).encode() + b"early") as connection:
        received = b""
        while not received.endswith(b"early"):
            received += connection.recv(4096)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
    assert received.count(b"HTTP/1.1 204") == 3
    assert received.split(b"\r\n\r\n")[-1] == b"early"


def test_client_that_leaves_while_dialing(agent: Agent) -> None:
    """A full backlog keeps the connection waiting; the agent must not answer into the void."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        fill = [socket.socket() for _ in range(4)]
        for one in fill:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        for _ in range(5):
            agent.raw(HEAD.format(port).encode()).close()
        assert agent.request("GET", "/health").status == 204
        for one in fill:
            one.close()


def test_half_close_is_passed_on(agent: Agent, serve: Callable[..., int]) -> None:
    def count(connection: socket.socket) -> None:
        connection.sendall(b"%d" % len(read_all(connection)))

    with dial(agent, serve(count)) as connection:
        connection.sendall(b"x" * 1000)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b"1000"


def test_half_close_of_the_port(agent: Agent, serve: Callable[..., int]) -> None:
    received: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        connection.sendall(b"bye")
        connection.shutdown(socket.SHUT_WR)
        received.append(read_all(connection))

    with dial(agent, serve(handle)) as connection:
        assert read_all(connection) == b"bye"
        connection.sendall(b"still listening")
    deadline = threading.Event()
    for _ in range(1000):
        if received:
            break
        deadline.wait(0.01)
    assert received == [b"still listening"]


def test_much_data_both_ways_with_back_pressure(agent: Agent, serve: Callable[..., int]) -> None:
    """The reader starts late: what is on the way is bounded by socket buffers, and nothing is lost."""
    content = hashlib.sha256(b"seed").digest() * 300000  # 9.6 MB
    with dial(agent, serve(echo)) as connection:
        sender = threading.Thread(target=lambda: (connection.sendall(content), connection.shutdown(socket.SHUT_WR)))
        sender.start()
        agent.run("true")
        assert agent.rss_kib() < 400_000
        assert hashlib.sha256(read_all(connection)).digest() == hashlib.sha256(content).digest()
        sender.join(TIMEOUT)


def test_reset_is_passed_on(agent: Agent, serve: Callable[..., int]) -> None:
    before = agent.descriptors()
    done = threading.Event()

    def handle(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionResetError):
            read_all(connection)
        done.set()

    connection = dial(agent, serve(handle))
    connection.sendall(b"x")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    assert done.wait(TIMEOUT)
    agent.request("GET", "/health")
    assert agent.descriptors() <= before + 1


def test_closed_port(agent: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    answer = agent.request("GET", f"/dial?port={port}", headers={"Connection": "Upgrade", "Upgrade": "aenv-dial"})
    assert (answer.status, answer.json) == (502, {"code": 502, "message": "port is not open"})


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "x", "80x", "99999999999999999999", "%30%00"])
def test_bad_port(agent: Agent, port: str) -> None:
    answer = agent.request("GET", f"/dial?port={port}", headers={"Connection": "Upgrade", "Upgrade": "aenv-dial"})
    assert answer.status == 400
    assert answer.json["message"].startswith("port: ")


def test_other_protocols_are_not_taken(agent: Agent, serve: Callable[..., int]) -> None:
    port = serve(echo)
    for headers in ({}, {"Upgrade": "websocket", "Connection": "Upgrade"}):
        answer = agent.request("GET", f"/dial?port={port}", headers=headers)
        assert (answer.status, answer.json["code"]) == (400, 400)
    assert agent.request("GET", "/health", headers={"Upgrade": "h2c", "Connection": "Upgrade"}).status == 204


def test_tunnels_leave_nothing(agent: Agent, serve: Callable[..., int]) -> None:
    port = serve(lambda connection: None)
    agent.request("GET", "/health")
    before = agent.descriptors()
    for _ in range(200):
        with dial(agent, port) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == b""
    agent.request("GET", "/health")
    assert agent.descriptors() <= before + 1
