"""From what a client asked for to what a network slot enforces."""

from __future__ import annotations

from aenv.errors import InvalidInputError
from aenv.network.base import DEFAULT_DNS, Policy
from aenv.network.policy import validate
from aenv.sandbox.service import NetworkOptions


def egress_policy(network: NetworkOptions) -> Policy:
    """The egress rules as addresses.

    Raises InvalidInputError for what only a proxy between guest and outside could enforce: names, header rules and an
    egress proxy.
    """
    for entry in network.allow_out:
        if not entry.replace(".", "").replace("/", "").isdigit() and ":" not in entry:
            raise InvalidInputError("network.allowOut", f"{entry!r}: rules by domain name are not supported yet")
    if network.rules:
        raise InvalidInputError("network.rules", "header rules are not supported yet")
    if network.egress_proxy is not None:
        raise InvalidInputError("network.egressProxy", "an egress proxy is not supported yet")
    policy = Policy(
        allow=tuple(network.allow_out),
        deny=tuple(network.deny_out),
        internet=network.internet,
        dns=DEFAULT_DNS if network.dns_servers is None else tuple(network.dns_servers),
    )
    validate(policy)
    return policy
