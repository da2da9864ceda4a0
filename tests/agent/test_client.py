from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aenv.agent.client import ENTROPY_BYTES, Agent, AgentMetrics, Init, identity
from aenv.errors import GuestError
from tests.agent.conftest import Guest
from tests.sandbox.doubles import METRICS


def init() -> Init:
    return identity(
        "i1", "t1", token=None, env={"A": "1"}, user="user", workdir="/home/user", incarnation="l1", machine_id="m"
    )


def ask(guest: Guest, question: Callable[[Agent], Awaitable[Any]], token: str | None = "t") -> Any:
    return guest.run(lambda: question(Agent(guest.socket, token)))


def test_init_sends_the_names_that_envd_reads(guest: Guest) -> None:
    ask(guest, lambda agent: agent.init(init()))
    ((line, headers, body),) = guest.requests
    assert line == "POST /init HTTP/1.1"
    assert headers["x-access-token"] == "t"
    sent = json.loads(body)
    assert sent["lifecycleID"] == "l1"
    assert {"envVars", "timestamp", "defaultUser", "hostname", "entropy"} <= set(sent)
    assert sent["accessToken"] is None


def test_without_a_token_none_is_sent(guest: Guest) -> None:
    ask(guest, lambda agent: agent.health(), token=None)
    assert "x-access-token" not in guest.requests[0][1]


def test_sync(guest: Guest) -> None:
    ask(guest, lambda agent: agent.sync())
    assert guest.requests[0][0] == "POST /sync HTTP/1.1"


def test_metrics(guest: Guest) -> None:
    guest.body = json.dumps(METRICS | {"unknown": [1]}).encode()
    assert ask(guest, lambda agent: agent.metrics()) == AgentMetrics(**METRICS)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        *(
            json.dumps(METRICS | change).encode()
            for change in (
                {"mem_used": -1},
                {"mem_used": 2**63},
                {"mem_used": 2**100},
                {"ts": "now"},
                {"cpu_used_pct": -1},
                {"cpu_used_pct": 1e300},
                {"cpu_used_pct": None},
            )
        ),
        json.dumps(METRICS)[:-1].encode() + b',"x":' + b"[" * 100_000,
        b"x" * ((1 << 20) + 1),
    ],
    ids=lambda b: repr(b[-40:]),
)
def test_metrics_that_make_no_sense_are_refused(guest: Guest, body: bytes) -> None:
    guest.body = body
    with pytest.raises(GuestError):
        ask(guest, lambda agent: agent.metrics())


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (401, b'{"code":401,"message":"token is wrong"}', "401 token is wrong"),
        (500, b"plain words", "500 plain words"),
        (500, b"\xff\xfe", "500"),
        (500, b"[1]", "500"),
        (500, b"[" * 100_000, "500"),
        (302, b"", "302"),
    ],
)
def test_refusals_carry_status_and_words(guest: Guest, status: int, body: bytes, text: str) -> None:
    guest.status, guest.body = status, body
    with pytest.raises(GuestError, match=text) as caught:
        ask(guest, lambda agent: agent.health())
    assert "GET /health" in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("cut", [0, 5, 30])
def test_a_cut_answer_is_a_guest_error(guest: Guest, cut: int) -> None:
    guest.body, guest.cut = b"x" * 100, cut
    with pytest.raises(GuestError):
        ask(guest, lambda agent: agent.health())


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "Connection refused"), TimeoutError()])
def test_a_guest_that_cannot_be_reached_is_a_guest_error(guest: Guest, error: OSError) -> None:
    async def connect(port: int) -> Any:
        raise error

    with pytest.raises(GuestError, match=r"GET /health: .+"):
        guest.run(lambda: Agent(connect, None).health())


def test_entropy_is_fresh_and_long_enough() -> None:
    made = {init().entropy for _ in range(10)}
    assert len(made) == 10
    assert {len(base64.b64decode(entropy)) for entropy in made} == {ENTROPY_BYTES}
