from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.api import validate
from aenv.api.models import NewSandbox, TimeoutBody
from aenv.api.network import network_options, network_update
from aenv.errors import InvalidInputError
from aenv.observe.logs import LogLevel
from aenv.sandbox.service import CreateOptions, OnTimeout


def create(body: dict[str, Any], generation: int = 2) -> CreateOptions:
    parsed = validate.parse_body(msgspec.json.encode({"templateID": "base"} | body), NewSandbox)
    return validate.create_options(parsed, generation=generation, default_timeout=300, max_timeout=3600)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"timeout": "5"}, "timeout"),
        ({"timeout": 5.5}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 3601}, "timeout"),
        ({"timeout": 10**18}, "timeout"),
        ({"templateID": 5}, "templateID"),
        ({"templateID": ""}, "templateID"),
        ({"templateID": "a\0b"}, "templateID"),
        ({"templateID": "x" * 257}, "templateID"),
        ({"autoPause": "yes"}, "autoPause"),
        ({"autoResume": True}, "autoResume"),
        ({"autoResume": {"enabled": 1}}, "autoResume.enabled"),
        ({"autoPauseMemory": False}, "autoPauseMemory"),
        ({"autoPauseMemory": False, "autoPause": True, "autoResume": {"enabled": True}}, "autoPauseMemory"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": []}, "metadata"),
        ({"envVars": {"A=B": "x"}}, "envVars"),
        ({"envVars": {"": "x"}}, "envVars"),
        ({"envVars": {"A\0": "x"}}, "envVars"),
        ({"envVars": {"A": "x\0y"}}, "envVars.A"),
        ({"envVars": {"A": None}}, "envVars"),
        ({"mcp": "x"}, "mcp"),
        ({"allow_internet_access": "no"}, "allow_internet_access"),
        ({"network": []}, "network"),
        ({"network": {"allowOut": "8.8.8.8"}}, "network.allowOut"),
        ({"volumeMounts": [{"name": "v"}]}, "volumeMounts"),
        ({"volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
        ({"iam": {"tokens": {str(n): {"audience": "a", "tokenType": "t"} for n in range(6)}}}, "iam.tokens"),
        ({"iam": {"tokens": {"a": {"audience": "a", "tokenType": "t"}}}}, "iam.tokens"),
    ],
)
def test_wrong_create_names_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        create(body)
    assert caught.value.field.startswith(field)


def test_null_is_the_same_as_absent() -> None:
    names = [name for name in NewSandbox.__struct_encode_fields__ if name != "templateID"]
    assert create(dict.fromkeys(names)) == create({})


def test_unknown_fields_are_ignored() -> None:
    assert create({"futureField": {"deep": [1, 2]}}) == create({})


def test_generations_differ_in_security_only() -> None:
    assert not create({}, generation=1).secure
    assert create({"secure": True}, generation=1).secure
    assert create({"secure": False}).secure


def test_auto_pause_combinations() -> None:
    paused = create({"autoPause": True, "autoPauseMemory": False})
    assert (paused.on_timeout, paused.pause_memory) == (OnTimeout.PAUSE, False)
    resumed = create({"autoPause": True, "autoResume": {"enabled": True}})
    assert (resumed.auto_resume, resumed.pause_memory) == (True, True)
    assert create({}).on_timeout is OnTimeout.KILL


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b"[]", b"null", b"5", b"\xff", b'{"timeout":1}x', b'{"timeout":NaN}', b'{"x":"\\ud800"}'],
)
def test_broken_json(body: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"^(body|timeout)"):
        validate.parse_body(body, TimeoutBody)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_json(opening: bytes) -> None:
    with pytest.raises(InvalidInputError, match="body"):
        validate.parse_body(b'{"timeout":1,"x":' + opening * 100_000, TimeoutBody)


def test_huge_number() -> None:
    with pytest.raises(InvalidInputError, match="timeout"):
        validate.parse_body(b'{"timeout":' + b"9" * 10_000 + b"}", TimeoutBody)


def test_missing_field_is_named_with_its_path() -> None:
    with pytest.raises(InvalidInputError, match=r"^timeout: is required$"):
        validate.parse_body(b"{}", TimeoutBody)
    with pytest.raises(InvalidInputError, match=r"^network\.egressProxy\.address: is required$"):
        create({"network": {"egressProxy": {}}})


def test_optional_body() -> None:
    from aenv.api.models import PauseBody

    assert validate.parse_body(b"", PauseBody, optional=True).memory is None


@pytest.mark.parametrize(("text", "expected"), [("abc1", "abc1"), ("abc1-node7", "abc1"), ("abc1-", "abc1")])
def test_sandbox_id(text: str, expected: str) -> None:
    assert validate.sandbox_id(text) == expected


@pytest.mark.parametrize("text", ["", "-", "-x", "ABC", "a b", "a/b", "..", "a.b", "a\n", "é", "a" * 65, "a-b/c"])
def test_wrong_sandbox_id(text: str) -> None:
    with pytest.raises(InvalidInputError, match="sandboxID"):
        validate.sandbox_id(text)


@pytest.mark.parametrize("key", ["", "A", "a_b", "a b", "x" * 256, "é"])
def test_wrong_idempotency_key(key: str) -> None:
    with pytest.raises(InvalidInputError, match="Idempotency-Key"):
        validate.idempotency_key(key)


# --- query parameters


def test_whole_number() -> None:
    assert validate.whole("100", "limit", low=1, high=100, default=7) == 100
    assert validate.whole(None, "limit", low=1, high=100, default=7) == 7
    assert validate.whole("", "limit", low=1, high=100, default=7) == 7


@pytest.mark.parametrize("text", ["0", "101", "-1", "1.0", "1e2", " 1", "+1", "1_0", "٣", "9" * 30, "x", "0x10"])
def test_wrong_whole_number(text: str) -> None:
    with pytest.raises(InvalidInputError, match="limit"):
        validate.whole(text, "limit", low=1, high=100, default=7)


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=4))
def test_metadata_survives_the_encoding_of_the_sdk(metadata: dict[str, str]) -> None:
    """What the SDKs build, less the outer query encoding, which the HTTP layer takes off."""
    wire = urlencode({quote(key): quote(value) for key, value in metadata.items()})
    assert validate.metadata_filter(wire) == metadata


def test_metadata_of_plain_clients() -> None:
    assert validate.metadata_filter("user=abc&app=prod") == {"user": "abc", "app": "prod"}
    assert validate.metadata_filter("k=a%20b") == {"k": "a b"}
    assert validate.metadata_filter("k=") == {"k": ""}
    assert validate.metadata_filter(None) == {}
    assert validate.metadata_filter("") == {}


@pytest.mark.parametrize("text", ["user", "a=1&b", "a=%", "a=%zz", "a=%2", "a=%FF", "a=%25FF", "&"])
def test_wrong_metadata(text: str) -> None:
    with pytest.raises(InvalidInputError, match="metadata"):
        validate.metadata_filter(text)


NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T12:00:00Z", NOON),
        ("2026-01-31t12:00:00z", NOON),
        ("2026-01-31T12:00:00.5Z", NOON + timedelta(milliseconds=500)),
        ("2026-01-31T12:00:00.123456789Z", NOON + timedelta(microseconds=123456)),
        ("2026-01-31T14:00:00+02:00", NOON),
        ("2026-01-31T14:00:00 02:00", NOON),
        ("2026-01-31T10:30:00-01:30", NOON),
    ],
)
def test_moment(text: str, expected: datetime) -> None:
    assert validate.moment(text, "startedAfter") == expected


@given(st.datetimes(timezones=st.just(timezone(timedelta(hours=5, minutes=30)))))
def test_moment_as_python_writes_it(value: datetime) -> None:
    try:
        expected = value.astimezone(UTC)
    except OverflowError:
        with pytest.raises(InvalidInputError):
            validate.moment(value.isoformat(), "startedAfter")
    else:
        assert validate.moment(value.isoformat(), "startedAfter") == expected


@pytest.mark.parametrize(
    "text",
    [
        "yesterday",
        "2026-01-31",
        "2026-01-31T12:00:00",
        "2026-01-31 12:00:00Z",
        "2026-02-30T12:00:00Z",
        "2026-01-31T25:00:00Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
        "٢٠٢٦-01-31T12:00:00Z",
        "2026-01-31T12:00:00+99:00",
        "2026-W05-6T12:00:00Z",
        "1700000000",
    ],
)
def test_wrong_moment(text: str) -> None:
    with pytest.raises(InvalidInputError, match="startedAfter"):
        validate.moment(text, "startedAfter")


def test_choices() -> None:
    both = frozenset({"running", "paused"})
    assert validate.choices("running,paused", "state", both) == both
    assert validate.choices("paused", "state", both) == {"paused"}
    assert validate.choices("", "state", both) == both
    with pytest.raises(InvalidInputError, match="state"):
        validate.choices("running,killed", "state", both)
    assert validate.choice("warn", "level", LogLevel, LogLevel.DEBUG) is LogLevel.WARN
    with pytest.raises(InvalidInputError, match="level"):
        validate.choice("fatal", "level", LogLevel, LogLevel.DEBUG)


# --- network


@pytest.mark.parametrize("entry", ["8.8.8.8", "10.0.0.0/8", "10.1.2.3/8", "::1", "fd00::/8", "0.0.0.0/0"])
def test_networks_are_kept_as_written(entry: str) -> None:
    options = create({"network": {"allowOut": [entry], "denyOut": [entry]}}).network
    assert options.allow_out == options.deny_out == (entry,)


@pytest.mark.parametrize("entry", ["example.com", "*.example.com", "EXAMPLE.com", "a.b-c.example", "xn--bcher-kva.de"])
def test_domains_need_everything_else_denied(entry: str) -> None:
    bodies: list[dict[str, Any]] = [
        {"network": {"denyOut": ["0.0.0.0/0"], "allowOut": [entry]}},
        {"network": {"allowOut": [entry]}, "allow_internet_access": False},
    ]
    for body in bodies:
        assert create(body).network.allow_out == (entry,)
    with pytest.raises(InvalidInputError, match=r"network\.allowOut"):
        create({"network": {"allowOut": [entry]}})


@pytest.mark.parametrize(
    "entry",
    ["", " ", "*", "*.", "a b", "8.8.8.256", "8.8.8.8/33", "1.2.3", "-a.com", "a..b", "http://a.com", "a.com:80",
     "fe80::1%eth0", "10.0.0.0/255.0.0.0", "a.com\n", "٨.8.8.8", "*.*.com", "a." * 130 + "com", "8.8.8.8/", "/8"],
)  # fmt: skip
def test_wrong_destination(entry: str) -> None:
    with pytest.raises(InvalidInputError, match=r"network\.allowOut"):
        create({"network": {"allowOut": [entry], "denyOut": ["0.0.0.0/0"]}})
    with pytest.raises(InvalidInputError, match=r"network\.denyOut"):
        create({"network": {"denyOut": [entry]}})


def test_domains_cannot_be_denied() -> None:
    with pytest.raises(InvalidInputError, match=r"network\.denyOut"):
        create({"network": {"denyOut": ["example.com"]}})


def test_no_internet_is_said_in_two_ways() -> None:
    assert not create({"allow_internet_access": False}).network.internet
    assert not create({"network": {"denyOut": ["0.0.0.0/0"]}}).network.internet
    assert create({"allow_internet_access": True}).network.internet
    assert create({"network": {"denyOut": ["10.0.0.0/8"]}}).network.internet


@pytest.mark.parametrize(
    ("network", "field"),
    [
        ({"allowOut": ["1.1.1.1"] * 1001}, "network.allowOut"),
        ({"maskRequestHost": "a b"}, "network.maskRequestHost"),
        ({"maskRequestHost": "a\r\nX: y"}, "network.maskRequestHost"),
        ({"maskRequestHost": "a" * 256}, "network.maskRequestHost"),
        ({"httpsPorts": [0]}, "network.httpsPorts"),
        ({"httpsPorts": [65536]}, "network.httpsPorts"),
        ({"httpsPorts": [49983]}, "network.httpsPorts"),
        ({"dnsServers": ["::1"]}, "network.dnsServers"),
        ({"dnsServers": ["dns.google"]}, "network.dnsServers"),
        ({"rules": {"*": []}}, "network.rules"),
        ({"rules": {f"d{n}.com": [] for n in range(11)}}, "network.rules"),
        ({"rules": {"a.com": [{}, {}]}}, "network.rules.a.com"),
        ({"rules": {"a.com": [], "A.com": []}}, "network.rules"),
        ({"rules": {"a.com": [{"transform": {"headers": {f"h{n}": "" for n in range(21)}}}]}}, "network.rules.a.com"),
        ({"rules": {"a.com": [{"transform": {"headers": {"a b": "x"}}}]}}, "network.rules.a.com"),
        ({"rules": {"a.com": [{"transform": {"headers": {"a": "x\r\ny: z"}}}]}}, "network.rules.a.com.a"),
        ({"egressProxy": {"address": "proxy"}}, "network.egressProxy.address"),
        ({"egressProxy": {"address": "proxy:0"}}, "network.egressProxy.address"),
        ({"egressProxy": {"address": "proxy:1", "password": "é" * 128}}, "network.egressProxy.password"),
        ({"egressProxy": {"address": "proxy:1", "tls": {"enabled": True}}}, "network.egressProxy.tls"),
    ],
)
def test_wrong_network(network: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        create({"network": network})
    assert caught.value.field.startswith(field)


def test_right_network() -> None:
    options = create(
        {
            "network": {
                "maskRequestHost": "localhost:${PORT}",
                "httpsPorts": [443],
                "dnsServers": [],
                "rules": {"*.API.example": [{"transform": {"headers": {"X-Key": "s"}}}]},
                "egressProxy": {"address": "[::1]:1080", "username": "u", "password": "p", "tls": {"enabled": False}},
            }
        }
    ).network
    assert options.mask_request_host == "localhost:${PORT}"
    assert options.https_ports == (443,)
    assert options.dns_servers == ()
    assert options.rules == {"*.api.example": {"X-Key": "s"}}
    assert options.egress_proxy is not None
    assert options.egress_proxy.password == "p"
    assert options.allow_public_traffic


def test_public_traffic_is_allowed_unless_denied() -> None:
    assert network_options(None, None).allow_public_traffic
    assert create({"network": {"allowPublicTraffic": None}}).network.allow_public_traffic
    assert not create({"network": {"allowPublicTraffic": False}}).network.allow_public_traffic


def test_an_update_names_its_fields_without_prefix() -> None:
    from aenv.api.models import NetworkUpdateBody

    with pytest.raises(InvalidInputError, match=r"^denyOut: "):
        network_update(NetworkUpdateBody(deny_out=["x.com"]))


def test_a_header_sent_twice() -> None:
    with pytest.raises(InvalidInputError, match="Idempotency-Key: sent more than once"):
        validate.header(["a", "a"], "Idempotency-Key", validate.idempotency_key)
    assert validate.header([], "Idempotency-Key", validate.idempotency_key) is None
