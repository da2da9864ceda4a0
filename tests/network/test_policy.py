from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import InvalidInputError
from aenv.network.base import Policy
from aenv.network.policy import (
    BUILT_IN_DENIED,
    BUILT_IN_DENIED6,
    MAX_ENTRIES,
    parse_networks,
    render_policy,
    validate,
)

BAD = [
    "", " ", "x", "example.com", "*.example.com", "1.2.3", "1.2.3.4.5", "256.1.1.1", "1.2.3.4/33", "1.2.3.4/-1",
    "1.2.3.4/", "1.2.3.4/255.255.255.0", "1.2.3.4/8/8", "01.2.3.4", "1.2.3.4 ", " 1.2.3.4", "1.2.3.4\n",
    "1.2.3.4, 5.6.7.8", "::1/129",
    "fe80::1%eth0", "fe80::1%eth0/64", ":::", "12345::", "::ffff:1.2.3.4", "::ffff:0:0/96",
    "\u0661.2.3.4",
    "1.2.3.4; drop", "} accept", "@set", 5, None, b"1.2.3.4", 1.5, ["1.2.3.4"], "1" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("entry", BAD, ids=lambda e: repr(e)[:30])
@pytest.mark.parametrize("field", ["allow", "deny", "dns"])
def test_bad_entry_is_named(field: str, entry: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        validate(Policy(**{field: ("1.1.1.1", entry)}))  # type: ignore[arg-type]
    assert caught.value.field == f"{field}[1]"
    assert repr(entry)[:80] in caught.value.message
    assert len(caught.value.message) < 300


@given(st.text(alphabet="0123456789abcdef.:/%-,;{} \n", max_size=50))
def test_whatever_is_accepted_is_a_network(text: str) -> None:
    try:
        [network] = parse_networks("allow", [text])
    except InvalidInputError:
        return
    assert network == ipaddress.ip_network(text, strict=False)
    script = render_policy(Policy(allow=(text,)), 1).switch
    assert str(network) in script or network.prefixlen == 0


@given(st.lists(st.ip_addresses().map(str), max_size=40))
def test_script_holds_each_address_once(addresses: list[str]) -> None:
    addresses = [a for a in addresses if not a.startswith("::ffff:")]
    change = render_policy(Policy(deny=tuple(addresses + addresses)), 1)
    four = {a for a in addresses if ":" not in a}
    found = re.search(r"deny4_1 .* elements = { (.*) }; }", change.fill)
    inline = re.findall(r"addresses ct original ip daddr ([0-9./]+) goto refuse", change.switch)
    listed = found[1].split(", ") if found else inline
    networks = [ipaddress.IPv4Network(n) for n in listed]
    assert all(any(ipaddress.IPv4Address(a) in n for n in networks) for a in four)
    assert sum(n.num_addresses for n in networks) == len(four)


@pytest.mark.parametrize(
    "address", ["10.0.0.53", "127.0.0.53", "169.254.169.253", "fd00::1", "fe80::1", "100.100.2.136"]
)
def test_resolver_must_be_public(address: str) -> None:
    with pytest.raises(InvalidInputError, match="not a public address"):
        validate(Policy(dns=(address,)))


def test_resolver_must_be_one_address() -> None:
    with pytest.raises(InvalidInputError, match="not a single address"):
        validate(Policy(dns=("8.8.8.0/24",)))


def test_too_many_entries() -> None:
    with pytest.raises(InvalidInputError, match="at most"):
        validate(Policy(allow=("1.2.3.4",) * (MAX_ENTRIES + 1)))


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "10.255.255.255", "100.64.0.1", "100.127.255.254", "127.1.2.3", "169.254.0.22", "169.254.169.254",
        "172.31.255.255", "192.168.1.1", "224.0.0.1", "239.255.255.250", "255.255.255.255", "::", "::1",
        "::ffff:10.0.0.1", "::10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1", "100::1", "fc00::1", "fd00:ae::22",
        "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1", "2001:0:1::1", "2002:a00:1::1",
    ],
)  # fmt: skip
def test_built_in_denials_cover(address: str) -> None:
    parsed = ipaddress.ip_address(address)
    lists = BUILT_IN_DENIED if parsed.version == 4 else BUILT_IN_DENIED6
    assert any(parsed in ipaddress.ip_network(n) for n in lists)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "2a00:1450::1"]
)
def test_built_in_denials_leave(address: str) -> None:
    parsed = ipaddress.ip_address(address)
    lists = BUILT_IN_DENIED if parsed.version == 4 else BUILT_IN_DENIED6
    assert not any(parsed in ipaddress.ip_network(n) for n in lists)
