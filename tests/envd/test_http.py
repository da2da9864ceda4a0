"""The HTTP server: framing, keep-alive, limits, hostile input, cross-origin requests."""

from __future__ import annotations

import json
import socket

import h11
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.envd.client import CONNECT_JSON, JSON, Agent, frame, post, read_all, shell, statuses

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
LIST = post("/process.Process/List", b"{}", JSON)


def test_health(agent: Agent) -> None:
    answer = agent.request("GET", "/health")
    assert (answer.status, answer.body) == (204, b"")
    assert "content-length" not in answer.headers
    assert agent.request("HEAD", "/health").status == 204


def test_keep_alive_and_close(agent: Agent) -> None:
    with agent.raw(GET) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 204")
        connection.sendall(LAST)
        assert statuses(read_all(connection)) == [204]


def test_pipelined_requests_are_answered_in_order(agent: Agent) -> None:
    envs = b"GET /envs HTTP/1.1\r\nHost: a\r\n\r\n"
    missing = b"GET /none HTTP/1.1\r\nHost: a\r\n\r\n"
    assert statuses(agent.exchange(GET + LIST + missing + envs + LAST)) == [204, 200, 404, 200, 204]


def test_pipelined_behind_a_stream(agent: Agent) -> None:
    start = post("/process.Process/Start", frame(shell("echo hi")), CONNECT_JSON)
    assert statuses(agent.exchange(start + LAST)) == [200, 204]


def test_requests_before_a_half_close_are_answered(agent: Agent) -> None:
    with agent.raw(LIST * 3) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert statuses(read_all(connection)) == [200] * 3


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_any_segmentation(agent: Agent, size: int) -> None:
    data = (
        LIST + b"POST /process.Process/List HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/json\r\nConnection: close\r\n\r\n1\r\n{\r\n1;ext=1\r\n}\r\n0\r\nTrailer: x\r\n\r\n"
    )
    with agent.raw() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), size):
            connection.sendall(data[at : at + size])
        assert statuses(read_all(connection)) == [200, 200]


def test_http_1_0(agent: Agent) -> None:
    assert statuses(agent.exchange(b"GET /health HTTP/1.0\r\n\r\n")) == [204]
    kept = b"GET /envs HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    assert statuses(agent.exchange(kept + b"GET /health HTTP/1.0\r\n\r\n")) == [200, 204]


def test_stream_to_http_1_0_ends_with_the_connection(agent: Agent) -> None:
    request = post("/process.Process/Start", frame(shell("echo hi")), CONNECT_JSON)
    head, data = agent.exchange(request.replace(b"HTTP/1.1", b"HTTP/1.0")).split(b"\r\n\r\n", 1)
    assert b"chunked" not in head
    assert data.endswith(b"\x02\0\0\0\x02{}")


def test_absolute_and_encoded_targets(agent: Agent) -> None:
    for target in (b"http://x/health", b"http://x/health?a=b", b"/%68ealth", b"/health?x=%41", b"HTTP://x:1/health"):
        request = LAST.replace(b"/health", target)
        assert statuses(agent.exchange(request)) == [204], target


@pytest.mark.parametrize("target", [b"/%00", b"/%zz", b"/%4", b"/health%", b"/a\x01b"])
def test_bad_targets(agent: Agent, target: bytes) -> None:
    assert statuses(agent.exchange(LAST.replace(b"/health", target))) == [400]


def test_unknown_path_and_method(agent: Agent) -> None:
    assert agent.request("GET", "/none").status == 404
    for path in ("/HEALTH", "/health/", "//health", "/health/../health"):
        assert agent.request("GET", path).status == 404
    assert agent.request("POST", "/health", b"x").status == 405
    assert agent.request("GET", "/process.Process/Start").status == 405
    answer = agent.request("DELETE", "/none")
    assert answer.json == {"code": 404, "message": "there is nothing at this path"}


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", 400),  # a TLS client
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /health HTTP/1.2\r\nHost: a\r\n\r\n", 505),
        (b"GET /health HTTP/3.0\r\nHost: a\r\n\r\n", 505),
        (b"GET /health\r\n\r\n", 505),
        (b"GET  HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nNo colon\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nBad name: x\r\n\r\n", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nContent-Length : 1\r\n\r\n1", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nExpect: the-worst\r\n\r\n", 417),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n1", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nContent-Length: 9223372036854775808\r\n\r\n", 413),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551609\r\n\r\n", 413),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n12", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n1", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 501),
        (b"POST /init HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", 400),
        (b"POST /init HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400),
    ],
)
def test_malformed_requests_are_refused_and_the_connection_ends(agent: Agent, data: bytes, status: int) -> None:
    answer = agent.exchange(data)
    assert statuses(answer) == [status], answer
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"Connection: close" in head
    assert json.loads(body)["code"] == status
    assert agent.request("GET", "/health").status == 204


def test_header_limits(agent: Agent) -> None:
    fine = b"".join(b"X-%d: %b\r\n" % (i, b"v" * 400) for i in range(100))
    assert statuses(agent.exchange(LAST.replace(b"Host: a\r\n", b"Host: a\r\n" + fine))) == [204]
    many = b"".join(b"X-%d: 1\r\n" % i for i in range(200))
    assert statuses(agent.exchange(LAST.replace(b"Host: a\r\n", b"Host: a\r\n" + many))) == [431]
    for large in (b"X: " + b"v" * 200000 + b"\r\n", b"X" * 200000 + b": v\r\n"):
        assert statuses(agent.exchange(LAST.replace(b"Host: a\r\n", b"Host: a\r\n" + large))) == [431]
    assert statuses(agent.exchange(LAST.replace(b"/health", b"/" + b"p" * 200000))) == [431]


def test_endless_header_section_is_cut(agent: Agent) -> None:
    with agent.raw(b"GET / HTTP/1.1\r\nHost: a\r\n") as connection:
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(b"X: y\r\n" * 40_000_000)
    assert agent.request("GET", "/health").status == 204


def test_expect_continue(agent: Agent) -> None:
    head, body = post("/process.Process/List", b"{}", JSON | {"Expect": "100-continue"}).split(b"\r\n\r\n")
    with agent.raw(head + b"\r\n\r\n") as connection:
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body + LAST)
        assert statuses(read_all(connection)) == [200, 204]


def test_expect_continue_is_not_given_to_a_refused_request(agent: Agent) -> None:
    request = post("/none", b"x" * 10, {"Expect": "100-continue"})[:-10]
    assert statuses(agent.exchange(request)) == [404]


def test_unwanted_body_does_not_hide_the_answer(agent: Agent) -> None:
    """The answer comes before the body is complete; the connection can be used again after it."""
    body = b"x" * 3000000
    assert statuses(agent.exchange(post("/none", body, {}) + LAST)) == [404, 204]


def test_body_that_is_cut(agent: Agent) -> None:
    for request in (post("/init", b"x" * 100, {}), post("/process.Process/List", b"{}", JSON)):
        with agent.raw(request[:-1]) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == b""
    assert agent.request("GET", "/health").status == 204


def test_cross_origin(agent: Agent) -> None:
    agent.init(accessToken="secret")
    asked = {"Origin": "https://x", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "x-access-token,content-type"}  # fmt: skip
    answer = agent.request("OPTIONS", "/process.Process/List", headers=asked)
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "x-access-token,content-type"
    for path in ("/health", "/envs"):  # a page must be able to read refusals too
        answer = agent.request("GET", path, headers={"Origin": "https://x"})
        assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in agent.request("GET", "/health").headers


def test_header_values_cannot_be_smuggled_into_answers(agent: Agent) -> None:
    asked = {"Origin": "https://x", "Access-Control-Request-Headers": "a\tb"}
    assert agent.request("OPTIONS", "/x", headers=asked).headers["access-control-allow-headers"] == "a\tb"


def parse_response(data: bytes) -> bytes:
    """One response as h11 understands it, to a request other than HEAD; returns what follows it."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA, data
    return client.trailing_data[0]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    methods=st.lists(st.sampled_from(["GET", "POST", "OPTIONS", "DELETE"]), min_size=1, max_size=4),
    noise=st.binary(max_size=40),
    cut=st.integers(0, 300),
    dropped=st.integers(0, 5),
)
def test_answers_to_damaged_requests_are_valid_http(
    agent: Agent, methods: list[str], noise: bytes, cut: int, dropped: int
) -> None:
    data = b"".join(f"{m} /health HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc".encode() for m in methods)
    data = data[:cut] + noise + data[cut + dropped :]
    with agent.raw(data) as connection:
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)
    while received:
        received = parse_response(received)
