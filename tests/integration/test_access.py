"""Who is let in where: a key or token opens what it is for and nothing else."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.conftest import Daemon

pytestmark = pytest.mark.vm

ENVD = 49983
Headers = list[tuple[str, str]]


@pytest.fixture
def boxes(daemon: Daemon) -> Iterator[list[dict[str, Any]]]:
    """Two sandboxes that are private: each has both tokens."""
    made = []
    for _ in range(2):
        body = {"templateID": "base", "timeout": 300, "network": {"allowPublicTraffic": False}}
        status, box = daemon.request("POST", "/v2/sandboxes", body)
        assert status == 201
        made.append(box)
    yield made
    for box in made:
        assert daemon.request("DELETE", f"/sandboxes/{box['sandboxID']}")[0] == 204


def ask(daemon: Daemon, path: str, headers: Headers) -> int:
    """The status of a GET with exactly these headers, duplicates kept."""
    where = urlsplit(daemon.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
    try:
        connection.putrequest("GET", path)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def to(box: dict[str, Any], port: int, *more: tuple[str, str]) -> Headers:
    return [("E2b-Sandbox-Id", box["sandboxID"]), ("E2b-Sandbox-Port", str(port)), *more]


def test_the_control_plane_opens_for_one_right_key_only(daemon: Daemon, boxes: list[dict[str, Any]]) -> None:
    right, wrong = ("X-API-Key", daemon.key), ("X-API-Key", "e2b_" + "0" * 40)
    assert ask(daemon, "/v2/sandboxes", [right]) == 200
    refused: list[Headers] = [
        [],
        [wrong],
        [("Authorization", f"Bearer {daemon.key}")],
        [("X-Admin-Token", daemon.key)],
        [("X-Team-ID", "team"), ("X-Supabase-Token", daemon.key)],
        [right, wrong],
        [wrong, right],
        [wrong, ("X-API-Key", "e2b_" + "1" * 40)],
        [("X-API-Key", boxes[0]["envdAccessToken"])],
        [("X-API-Key", boxes[0]["trafficAccessToken"])],
        [("X-Access-Token", boxes[0]["envdAccessToken"])],
        [("e2b-traffic-access-token", boxes[0]["trafficAccessToken"])],
    ]
    for headers in refused:
        for path in ("/v2/sandboxes", f"/sandboxes/{boxes[0]['sandboxID']}", "/templates", "/nowhere"):
            assert ask(daemon, path, headers) == 401, (path, headers)
    assert ask(daemon, "/health", []) == 204


def test_an_agent_opens_for_its_own_token_only(daemon: Daemon, boxes: list[dict[str, Any]]) -> None:
    one, other = boxes
    assert one["envdAccessToken"] != other["envdAccessToken"] != other["trafficAccessToken"]
    assert ask(daemon, "/envs", to(one, ENVD, ("X-Access-Token", one["envdAccessToken"]))) == 200
    for token in ("", daemon.key, one["trafficAccessToken"], other["envdAccessToken"], one["envdAccessToken"][:-1]):
        assert ask(daemon, "/envs", to(one, ENVD, ("X-Access-Token", token))) == 401, token
    assert ask(daemon, "/envs", to(one, ENVD)) == 401
    assert ask(daemon, "/envs", to(one, ENVD, ("X-API-Key", daemon.key))) == 401
    assert ask(daemon, "/health", to(one, ENVD)) == 204
    for internal in ("/init", "/dial?port=22", "/sync"):
        assert ask(daemon, internal, to(one, ENVD, ("X-Access-Token", one["envdAccessToken"]))) == 404


def test_a_private_port_opens_for_its_own_traffic_token_only(daemon: Daemon, boxes: list[dict[str, Any]]) -> None:
    one, other = boxes
    header = "e2b-traffic-access-token"
    assert ask(daemon, "/", to(one, 8000, (header, one["trafficAccessToken"]))) == 502  # let in; nothing listens
    for token in ("", daemon.key, one["envdAccessToken"], other["trafficAccessToken"]):
        assert ask(daemon, "/", to(one, 8000, (header, token))) == 403, token
    assert ask(daemon, "/", to(one, 8000)) == 403
    assert ask(daemon, "/", to(one, 8000, (header, one["trafficAccessToken"]), (header, "x"))) == 403
