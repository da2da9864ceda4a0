from __future__ import annotations

import pytest

from aenv.errors import InvalidInputError
from aenv.network.base import DEFAULT_DNS, Policy
from aenv.sandbox.policy import egress_policy
from aenv.sandbox.service import EgressProxy, NetworkOptions


def test_nothing_asked_is_the_default_policy() -> None:
    assert egress_policy(NetworkOptions()) == Policy()


def test_addresses_are_taken_over() -> None:
    policy = egress_policy(
        NetworkOptions(allow_out=("8.8.8.8", "2001:4860::/32"), deny_out=("1.1.1.0/24",), dns_servers=("9.9.9.9",))
    )
    assert policy == Policy(("8.8.8.8", "2001:4860::/32"), ("1.1.1.0/24",), True, ("9.9.9.9",))
    assert egress_policy(NetworkOptions()).dns == DEFAULT_DNS
    assert egress_policy(NetworkOptions(dns_servers=())).dns == ()


@pytest.mark.parametrize(
    "options", [NetworkOptions(allow_internet_access=False), NetworkOptions(deny_out=("0.0.0.0/0",))]
)
def test_denying_all_of_ipv4_means_no_internet(options: NetworkOptions) -> None:
    assert not egress_policy(options).internet


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (NetworkOptions(allow_out=("example.com",)), "network.allowOut"),
        (NetworkOptions(allow_out=("*.example.com",)), "network.allowOut"),
        (NetworkOptions(allow_out=("host:443",)), ""),
        (NetworkOptions(allow_out=("1.2.3",)), ""),
        (NetworkOptions(deny_out=("example.com",)), ""),
        (NetworkOptions(rules={"example.com": {}}), "network.rules"),
        (NetworkOptions(egress_proxy=EgressProxy("h:1")), "network.egressProxy"),
        (NetworkOptions(dns_servers=("dns.example.com",)), ""),
    ],
)
def test_what_cannot_be_enforced_is_refused(options: NetworkOptions, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        egress_policy(options)
    assert caught.value.field.startswith(field)
    assert caught.value.field
