"""Routing by host name and by headers."""

from __future__ import annotations

import pytest

from aenv.http.message import Headers, HttpError, Request
from aenv.proxy.route import Route, route

DOMAIN = "e2b.test:8443"


def ask(host: str, *headers: tuple[str, str]) -> Route | None:
    return route(Request("GET", "/", Headers([("Host", host), *headers])), DOMAIN)


def both_headers(sandbox: str = "iabc", port: str = "49983") -> tuple[tuple[str, str], tuple[str, str]]:
    return ("E2b-Sandbox-Id", sandbox), ("e2b-sandbox-port", port)


@pytest.mark.parametrize(
    "host",
    [
        "8080-iabc.e2b.test",
        "8080-iabc.e2b.test:8443",
        "8080-IABC.E2B.TEST",
        "8080-iabc.other.dev.",
        "8080-iabc.localhost",
    ],
)
def test_host_label(host: str) -> None:
    assert ask(host) == Route("iabc", 8080)
    assert ask(host, *both_headers("iother", "1")) == Route("iabc", 8080)  # headers say nothing here


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:3000",
        "127.0.0.1:3000",
        "[::1]:3000",
        "[::1]",
        "10.1.2.3",
        "sandbox.e2b.test:8443",
        "SANDBOX.e2b.test",
    ],
)
def test_headers_where_the_host_says_nothing(host: str) -> None:
    assert ask(host, *both_headers()) == Route("iabc", 49983)
    assert ask(host) is None


@pytest.mark.parametrize("host", ["api.e2b.test", "e2b.test", "sandbox.evil.test", "example.com", "", "8080-iabc"])
def test_headers_are_not_honoured_elsewhere(host: str) -> None:
    assert ask(host, *both_headers()) is None


@pytest.mark.parametrize(
    "host",
    [
        "0-iabc.e2b.test",
        "65536-iabc.e2b.test",
        "123456-i.e2b.test",
        "80-.e2b.test",
        "80-i_a.e2b.test",
        "80-a-b.e2b.test",
        "80-é.e2b.test",
    ],
)
def test_bad_labels(host: str) -> None:
    with pytest.raises(HttpError, match="Host: invalid") as caught:
        ask(host)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "headers",
    [
        both_headers(port="0"), both_headers(port="65536"), both_headers(port="+1"), both_headers(port=" 1"),
        both_headers(port=""), both_headers(port="\u0661"), both_headers(sandbox="a/b"), both_headers(sandbox=""),
        both_headers(sandbox="A"),
        both_headers(sandbox="a" * 65), both_headers(sandbox="a\n"), both_headers()[:1], both_headers()[1:],
        both_headers() * 2, (*both_headers(), ("E2b-Sandbox-Id", "iabc")),
    ],
)  # fmt: skip
def test_bad_headers(headers: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(HttpError) as caught:
        ask("localhost", *headers)
    assert caught.value.status == 400
