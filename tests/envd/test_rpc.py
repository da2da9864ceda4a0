"""The Connect protocol: content types, frames good and hostile, errors in their two forms."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.envd.client import CONNECT_JSON, JSON, Agent, frame, post, read_all, shell

START = "/process.Process/Start"
STREAMS = [START, "/process.Process/Connect", "/process.Process/StreamInput"]


def split_frames(body: bytes) -> list[tuple[int, Any]]:
    frames = []
    while body:
        flags, size = struct.unpack(">BI", body[:5])
        assert len(body) >= 5 + size
        frames.append((flags, json.loads(body[5 : 5 + size])))
        body = body[5 + size :]
    return frames


def stream_error(agent: Agent, path: str, body: bytes, headers: dict[str, str] | None = None) -> str:
    """Code of a stream that must carry nothing but a failure."""
    answer = agent.request("POST", path, body, CONNECT_JSON | (headers or {}))
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/connect+json"
    [(flags, end)] = split_frames(answer.body)
    assert flags == 2
    assert end["error"]["message"]
    return str(end["error"]["code"])


# ---- content types and encodings ----


@pytest.mark.parametrize("value", ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON;x"])
def test_unary_types(agent: Agent, value: str) -> None:
    assert agent.request("POST", "/process.Process/List", b"{}", {"Content-Type": value}).status == 200


@pytest.mark.parametrize(
    "value", ["application/proto", "application/connect+json", "text/plain", "application/jsonx", ""]
)
def test_unary_refuses_other_types(agent: Agent, value: str) -> None:
    answer = agent.request("POST", "/process.Process/List", b"{}", {"Content-Type": value})
    assert answer.status == 415
    assert answer.headers["accept-post"] == "application/json"


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("value", ["application/json", "application/connect+proto", "application/grpc", ""])
def test_stream_refuses_other_types(agent: Agent, path: str, value: str) -> None:
    answer = agent.request("POST", path, frame({}), {"Content-Type": value})
    assert answer.status == 415
    assert answer.headers["accept-post"] == "application/connect+json"


def test_compression_is_refused(agent: Agent) -> None:
    answer = agent.request("POST", "/process.Process/List", b"{}", JSON | {"Content-Encoding": "gzip"})
    assert (answer.status, answer.json["code"]) == (501, "unimplemented")
    for path in STREAMS:
        assert stream_error(agent, path, frame({}), {"Connect-Content-Encoding": "gzip"}) == "unimplemented"
    identity = {"Content-Encoding": "identity", "Connect-Content-Encoding": "identity",
                "Connect-Accept-Encoding": "identity", "Connect-Protocol-Version": "1"}  # fmt: skip
    assert agent.run("true", identity).ended is not None


# ---- messages ----

NOT_OBJECTS = [b"", b"null", b"[]", b"1", b'"x"', b"{", b"{}}", b'{"a":}', b"{'a': 1}", b"\xff\xfe", b'{"a": "\xff"}',
               b'{"a": "\\u0000"}', b'{"a": "\\ud800"}', b'{"a": 1, "a": 2}', b"{" * 100000, b'{"a":' * 5000,
               b"[" * 3000 + b"]" * 3000, b'{"process": {"pid": 1e999}}',
               b'{"a": 123456789012345678901234567890}']  # fmt: skip


@pytest.mark.parametrize("body", NOT_OBJECTS)
def test_unary_message_that_is_no_object(agent: Agent, body: bytes) -> None:
    status, code, message = agent.failure("SendSignal", body)
    assert (status, code) == (400, "invalid_argument")
    assert message
    assert "content-length" in agent.unary("SendSignal", body).headers


@pytest.mark.parametrize("body", NOT_OBJECTS)
def test_stream_message_that_is_no_object(agent: Agent, body: bytes) -> None:
    for path in STREAMS:
        assert stream_error(agent, path, frame(body)) == "invalid_argument"


def test_unary_size_limit(agent: Agent) -> None:
    fits = json.dumps({"x": "y" * (4 * 1024 * 1024 - 100)}).encode()
    assert agent.unary("List", fits).status == 200
    large = b" " * (4 * 1024 * 1024 + 1)
    for headers in ({}, {"Transfer-Encoding": "chunked"}):
        if headers:
            size = b"%x\r\n" % len(large)
            head = post("/process.Process/List", b"", JSON | headers).replace(b"Content-Length: 0\r\n", b"")
            with agent.raw(head + size + large + b"\r\n0\r\n\r\n") as connection:
                assert connection.recv(12) == b"HTTP/1.1 429"
        else:
            status, code, _ = agent.failure("List", large)
            assert (status, code) == (429, "resource_exhausted")


def test_announced_size_alone_is_refused(agent: Agent) -> None:
    request = post("/process.Process/List", b"", JSON).replace(b"Length: 0", b"Length: 99999999")
    with agent.raw(request) as connection:
        assert connection.recv(12) == b"HTTP/1.1 429"


# ---- frames ----


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_argument"),
        (b"\0", "invalid_argument"),
        (b"\0\0\0\0", "invalid_argument"),
        (b"\0\0\0\0\x09{}", "invalid_argument"),  # cut
        (frame({}, flags=1), "invalid_argument"),  # compressed
        (frame({}, flags=0x80), "invalid_argument"),
        (frame({}, flags=0xFF), "invalid_argument"),
        (b"\0\xff\xff\xff\xff", "resource_exhausted"),
        (b"\0\x00\x40\x00\x01" + b"{}", "resource_exhausted"),  # 4 MiB + 1
        (b"\0\x7f\xff\xff\xff" + b"x" * 1000, "resource_exhausted"),
        (b"\0\0\0\0\0", "invalid_argument"),  # empty message
        (b"POST / HTTP/1.1\r\n", "invalid_argument"),
    ],
)
def test_hostile_frames(agent: Agent, path: str, body: bytes, code: str) -> None:
    assert stream_error(agent, path, body) == code
    assert agent.request("GET", "/health").status == 204


def test_more_than_one_request_message(agent: Agent) -> None:
    body = frame(shell("sleep 100"))
    assert stream_error(agent, START, body + body) == "invalid_argument"
    assert agent.call("List", {}) == {"processes": []}


@pytest.mark.parametrize("piece", [1, 3, 6])
def test_frames_cut_anywhere(agent: Agent, piece: int) -> None:
    body = frame(shell("echo hi; exit 3"))
    chunks = [body[at : at + piece] for at in range(0, len(body), piece)]
    data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    head = post(START, b"", CONNECT_JSON | {"Connection": "close"}).replace(
        b"Content-Length: 0", b"Transfer-Encoding: chunked"
    )
    answer = agent.exchange(head + data)
    assert b'"exitCode":3' in answer


def test_start_does_not_wait_for_the_end_of_the_request(agent: Agent) -> None:
    body = frame(shell("echo started"))
    head = post(START, b"", CONNECT_JSON).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with agent.raw(head + b"%x\r\n%b\r\n" % (len(body), body)) as connection:
        received = b""
        while b'"end"' not in received:
            received += connection.recv(4096)


def test_client_that_ends_its_direction_is_gone(agent: Agent, tmp_path: Any) -> None:
    """A stream whose reader has hung up is let go; the process is not."""
    with agent.raw(post(START, frame(shell("read line; echo $line")), CONNECT_JSON)) as connection:
        while b'"start"' not in connection.recv(4096):
            pass
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)
    [process] = agent.call("List", {})["processes"]
    agent.call("CloseStdin", {"process": {"pid": process["pid"]}})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=60), cut=st.integers(0, 60), dropped=st.integers(0, 20), path=st.sampled_from(STREAMS))
def test_damaged_frames_get_whole_frames(agent: Agent, noise: bytes, cut: int, dropped: int, path: str) -> None:
    body = frame({"process": {"pid": 4999999, "tag": ""}}) + frame({"start": {"process": {"tag": "x"}}})
    body = body[:cut] + noise + body[cut + dropped :]
    answer = agent.request("POST", path, body, CONNECT_JSON)
    assert answer.status == 200
    frames = split_frames(answer.body)
    assert [flags for flags, _ in frames] == [2]
    assert frames[0][1]["error"]["code"] in ("invalid_argument", "not_found", "resource_exhausted")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=5)
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["process", "pid", "tag", "input", "stdin", "signal", "pty", "size"]), inner
            )
        ),
        max_leaves=12,
    ),
    st.sampled_from(["List", "Update", "SendInput", "SendSignal", "CloseStdin"]),
)
def test_any_json_is_answered_with_json(agent: Agent, message: Any, method: str) -> None:
    answer = agent.unary(method, message)
    assert answer.status in (200, 400, 404)
    assert isinstance(answer.json, dict)
