from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv.agent.process import MAX_FRAME, Ended, Event, Output, Processes, Started
from aenv.errors import AenvError, GuestError
from tests.agent.conftest import Guest, end, frame

START = {"event": {"start": {"pid": 7}}}
DATA = {"event": {"data": {"stdout": base64.b64encode(b"hello").decode()}}}
ENDED = {"event": {"end": {"exitCode": 3, "exited": True, "status": "exit status 3"}}}


def run(guest: Guest, **options: Any) -> list[Event]:
    async def scenario() -> list[Event]:
        processes = Processes(guest.connect, {"Host": "guest", "X-Access-Token": "t"}, options.pop("user", None))
        return [event async for event in processes.start("/bin/echo", ["a"], **options)]

    return guest.run(scenario)


@pytest.mark.parametrize("pieces", [0, 1, 7])
def test_a_stream_becomes_events_and_keepalives_are_ignored(guest: Guest, pieces: int) -> None:
    keepalive = frame({"event": {"keepalive": {}}})
    pty = {"event": {"data": {"pty": "AAE="}}}
    guest.body = keepalive + frame(START) + keepalive + frame(DATA) + frame(pty) + frame(ENDED) + end()
    guest.pieces = pieces
    assert run(guest) == [
        Started(7), Output("stdout", b"hello"), Output("pty", b"\0\1"), Ended(3, "exit status 3"),
    ]  # fmt: skip


def test_the_request_says_what_was_asked(guest: Guest) -> None:
    guest.body = frame(START) + frame(ENDED) + end()
    run(guest, env={"A": "ä"}, cwd="/tmp", pty=(80, 24), stdin=True, tag="shell", user="root")
    ((line, headers, body),) = guest.requests
    assert line == "POST /process.Process/Start HTTP/1.1"
    assert headers["content-type"] == "application/connect+json"
    assert headers["x-access-token"] == "t"
    assert base64.b64decode(headers["authorization"].removeprefix("Basic ")) == b"root:"
    assert int(headers["keepalive-ping-interval"]) > 0
    flags, length = struct.unpack_from(">BI", body)
    assert (flags, length) == (0, len(body) - 5)
    assert json.loads(body[5:]) == {
        "process": {"cmd": "/bin/echo", "args": ["a"], "envs": {"A": "ä"}, "cwd": "/tmp"},
        "stdin": True,
        "pty": {"size": {"cols": 80, "rows": 24}},
        "tag": "shell",
    }


def test_a_signal_has_no_exit_code_zero(guest: Guest) -> None:
    ended = {"event": {"end": {"exitCode": -1, "exited": False, "status": "signal: killed"}}}
    guest.body = frame(START) + frame(ended) + end()
    assert run(guest)[-1] == Ended(-1, "signal: killed")


def test_an_end_without_exit_code_is_success_because_zero_is_left_out(guest: Guest) -> None:
    guest.body = frame(START) + frame({"event": {"end": {"exited": True}}}) + end()
    assert run(guest)[-1] == Ended(0, "")


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (400, b'{"code":"invalid_argument","message":"cmd: is missing"}', "cmd: is missing"),
        (502, b'{"message":"the sandbox is running but port is not open"}', "port is not open"),
        (404, b"<html>", "status 404"),
        (500, b"", "status 500"),
        (500, b'{"message":null}', "status 500"),
        (500, b"[" * 100_000, "status 500"),
        (200, end({"error": {"code": "not_found", "message": "no such file: /bin/echo"}}), "no such file"),
        (200, frame(START) + end({"error": {"code": "internal"}}), "internal"),
        (200, end({"error": "plain words"}), "plain words"),
        (200, end({"error": ["list"]}), "list"),
    ],
)
def test_errors_carry_the_words_of_the_agent(guest: Guest, status: int, body: bytes, text: str) -> None:
    guest.status, guest.body = status, body
    with pytest.raises(GuestError, match=text):
        run(guest)


HOSTILE = [
    b"",
    b"\0",
    frame(START),  # no end
    frame(START) + frame(DATA)[:-3],
    struct.pack(">BI", 0, MAX_FRAME + 1) + b"x" * 100,
    struct.pack(">BI", 0, 2**32 - 1),
    frame(b"not json"),
    frame(b"\xff\xfe"),
    frame(b""),
    frame(b"[]"),
    frame(b"[" * 100_000),
    frame(b'{"a":' * 100_000),
    frame({}),
    frame({"event": None}),
    frame({"event": []}),
    frame({"event": "start"}),
    frame({"event": {"start": None}}),
    frame({"event": {"start": {}}}),
    frame({"event": {"start": {"pid": "x"}}}),
    frame({"event": {"start": {"pid": [1]}}}),
    frame({"event": {"data": {}}}),
    frame({"event": {"data": []}}),
    frame({"event": {"data": {"stdout": "not base64!"}}}),
    frame({"event": {"data": {"stdout": 5}}}),
    frame({"event": {"data": {"elsewhere": "AAAA"}}}),
    frame({"event": {"end": []}}),
    frame({"event": {"end": {"exitCode": "x"}}}),
    frame({"event": {"end": {"exitCode": None}}}),
    frame({"event": {"unknown": {}}}),
    frame(START, 1),  # compressed, which nobody asked for
    end(b"nonsense"),
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda b: repr(b[:40]))
def test_hostile_streams_are_errors_and_nothing_else(guest: Guest, body: bytes) -> None:
    guest.body = body
    with pytest.raises(GuestError) as caught:
        run(guest)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("where", [0, 1, 10, 60, 80, 120])
def test_a_connection_cut_anywhere_is_an_error(guest: Guest, where: int) -> None:
    guest.body = frame(START) + frame(DATA) + frame(ENDED) + end()
    guest.cut = where
    with pytest.raises(GuestError):
        run(guest)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_is_an_event_or_an_error(data: st.DataObject) -> None:
    body = bytearray(frame(START) + frame(DATA) + frame(ENDED) + end())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    guest = Guest(body=bytes(body))
    try:
        events = run(guest)
    except GuestError:
        return
    assert all(isinstance(event, Started | Output | Ended) for event in events)


UNARY = [
    ("send_input", (7, b"\0x"), {"pty": False}, "SendInput", {"process": {"pid": 7}, "input": {"stdin": "AHg="}}),
    ("send_input", (7, b"x"), {"pty": True}, "SendInput", {"process": {"pid": 7}, "input": {"pty": "eA=="}}),
    ("close_stdin", (7,), {}, "CloseStdin", {"process": {"pid": 7}}),
    ("resize", (7, 80, 24), {}, "Update", {"process": {"pid": 7}, "pty": {"size": {"cols": 80, "rows": 24}}}),
    ("signal", (7, "SIGNAL_SIGTERM"), {}, "SendSignal", {"process": {"pid": 7}, "signal": "SIGNAL_SIGTERM"}),
]


def call(guest: Guest, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    async def scenario() -> None:
        await getattr(Processes(guest.connect, {"Host": "guest"}), method)(*arguments, **options)

    guest.run(scenario)


@pytest.mark.parametrize(("method", "arguments", "options", "name", "body"), UNARY)
def test_calls_say_what_was_asked(
    guest: Guest, method: str, arguments: tuple[Any, ...], options: dict[str, Any], name: str, body: Any
) -> None:
    guest.body = b"{}"
    call(guest, method, arguments, options)
    ((line, headers, sent),) = guest.requests
    assert line == f"POST /process.Process/{name} HTTP/1.1"
    assert headers["content-type"] == "application/json"
    assert json.loads(sent) == body


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (404, b'{"code":"not_found","message":"no process 7"}', "no process 7"),
        (500, b"oops", "SendInput failed with status 500"),
        (200, b"oops", "not a JSON object"),
        (200, b"[" * 100_000, "not a JSON object"),
        (200, b"x" * (MAX_FRAME + 1), "SendInput"),
    ],
)
def test_calls_that_fail_say_why(guest: Guest, status: int, body: bytes, text: str) -> None:
    guest.status, guest.body = status, body
    with pytest.raises(GuestError, match=text):
        call(guest, "send_input", (7, b"x"), {"pty": False})


def test_a_call_without_a_listener_is_an_error_of_ours() -> None:
    guest = Guest()

    async def scenario() -> None:
        guest.port = 1  # nobody listens there
        await Processes(guest.connect, {"Host": "guest"}).close_stdin(7)

    with pytest.raises((AenvError, OSError)):
        guest.run(scenario)
