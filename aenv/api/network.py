"""Checks of network options: who a sandbox may reach, and who may reach it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from aenv.api.models import EgressProxyBody, NetworkBody, NetworkUpdateBody, RuleBody
from aenv.errors import InvalidInputError
from aenv.sandbox.service import ALL_IPV4, EgressProxy, NetworkOptions

ENVD_PORT = 49983
MAX_ENTRIES = 1000  # of one list; an nftables set holds more, a person writes fewer
MAX_RULE_DOMAINS = 10
MAX_RULE_HEADERS = 20

_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_DOMAIN = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*\.?", re.IGNORECASE)
_HOST_MASK = re.compile(r"(?=.{1,255}$)[A-Za-z0-9._-]+(?::[0-9]{1,5})?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\U0010ffff]{0,8192}")


def network_options(body: NetworkBody | None, allow_internet_access: bool | None) -> NetworkOptions:
    """From a create request."""
    if body is None:
        return NetworkOptions(allow_internet_access=allow_internet_access)
    egress = _egress(body, allow_internet_access, "network.")
    return NetworkOptions(
        allow_out=egress.allow_out,
        deny_out=egress.deny_out,
        allow_internet_access=allow_internet_access,
        rules=egress.rules,
        egress_proxy=egress.egress_proxy,
        dns_servers=egress.dns_servers,
        allow_public_traffic=body.allow_public_traffic is not False,
        mask_request_host=_host_mask(body.mask_request_host),
        https_ports=_ports(body.https_ports or []),
    )


def network_update(body: NetworkUpdateBody) -> NetworkOptions:
    """From a request to replace the egress rules: what is left out is cleared."""
    return _egress(body, body.allow_internet_access, "")


def _egress(body: NetworkBody | NetworkUpdateBody, allow_internet_access: bool | None, prefix: str) -> NetworkOptions:
    allow = _entries(body.allow_out or [], f"{prefix}allowOut")
    deny = _entries(body.deny_out or [], f"{prefix}denyOut")
    for entry in deny:
        if not _is_network(entry):
            raise InvalidInputError(f"{prefix}denyOut", f"{entry[:80]!r} is not an IP address or CIDR block")
    has_domain = False
    for entry in allow:
        if _is_network(entry):
            continue
        # Digits and dots only is an address that went wrong, not a name.
        if not _DOMAIN.fullmatch(entry) or len(entry) > 253 or re.fullmatch(r"[0-9./]+", entry):
            raise InvalidInputError(f"{prefix}allowOut", f"{entry[:80]!r} is not an IP address, CIDR block or domain")
        has_domain = True
    options = NetworkOptions(
        allow_out=allow,
        deny_out=deny,
        allow_internet_access=allow_internet_access,
        rules=_rules(body.rules or {}, f"{prefix}rules"),
        egress_proxy=_egress_proxy(body.egress_proxy, f"{prefix}egressProxy"),
        dns_servers=_dns_servers(body.dns_servers, f"{prefix}dnsServers"),
    )
    if has_domain and options.internet:
        raise InvalidInputError(f"{prefix}allowOut", f"domains need {ALL_IPV4} in denyOut: else all is allowed anyway")
    return options


def _entries(entries: list[str], field: str) -> tuple[str, ...]:
    if len(entries) > MAX_ENTRIES:
        raise InvalidInputError(field, f"at most {MAX_ENTRIES} entries")
    return tuple(entries)


def _is_network(text: str) -> bool:
    if not text.isascii() or "%" in text:  # no other scripts' digits, no zones: they mean nothing inside a guest
        return False
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    # The module also takes netmasks ("10.0.0.0/255.0.0.0"), which no other tool on the way would.
    return re.fullmatch(r"[^/]+(/[0-9]{1,3})?", text) is not None


def _rules(rules: Mapping[str, list[RuleBody]], field: str) -> dict[str, dict[str, str]]:
    if len(rules) > MAX_RULE_DOMAINS:
        raise InvalidInputError(field, f"at most {MAX_RULE_DOMAINS} domains")
    checked: dict[str, dict[str, str]] = {}
    for domain, transforms in rules.items():
        if not _DOMAIN.fullmatch(domain) or len(domain) > 253:
            raise InvalidInputError(field, f"{domain[:80]!r} is not a domain or *.domain")
        if len(transforms) > 1:
            raise InvalidInputError(f"{field}.{domain}", "one transform per domain")
        transform = transforms[0].transform if transforms else None
        headers = (transform.headers if transform is not None else None) or {}
        _headers(headers, f"{field}.{domain}")
        name = domain.lower()
        if name in checked:
            raise InvalidInputError(f"{field}.{domain}", "given twice")
        checked[name] = headers
    return checked


def _headers(headers: Mapping[str, str], field: str) -> None:
    if len(headers) > MAX_RULE_HEADERS:
        raise InvalidInputError(field, f"at most {MAX_RULE_HEADERS} headers")
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise InvalidInputError(field, f"{name[:80]!r} is not a header name")
        if not _HEADER_VALUE.fullmatch(value):
            raise InvalidInputError(f"{field}.{name}", "not a header value: too long or holds control characters")


def _egress_proxy(body: EgressProxyBody | None, field: str) -> EgressProxy | None:
    if body is None:
        return None
    host, colon, port = body.address.rpartition(":")
    if not colon or not (_DOMAIN.fullmatch(host) or _is_network(host.strip("[]"))) or not _is_port(port):
        raise InvalidInputError(f"{field}.address", "expected host:port")
    for name, text in (("username", body.username), ("password", body.password)):
        if len((text or "").encode()) > 255:  # RFC 1929 has one byte for the length
            raise InvalidInputError(f"{field}.{name}", "at most 255 bytes")
    if body.tls is not None and body.tls.enabled:
        raise InvalidInputError(f"{field}.tls", "TLS to the proxy is not supported")
    return EgressProxy(body.address, body.username or "", body.password or "")


def _dns_servers(servers: list[str] | None, field: str) -> tuple[str, ...] | None:
    if servers is None:
        return None
    for server in _entries(servers, field):
        try:
            ipaddress.IPv4Address(server)
        except ValueError as error:
            raise InvalidInputError(field, f"{server[:80]!r} is not an IPv4 address") from error
    return tuple(servers)


def _host_mask(mask: str | None) -> str | None:
    """A Host header with `${PORT}` where the port of the request goes."""
    if mask and not _HOST_MASK.fullmatch(mask.replace("${PORT}", "65535")):
        raise InvalidInputError("network.maskRequestHost", "expected host or host:port, ${PORT} may stand in it")
    return mask or None


def _ports(ports: list[int]) -> tuple[int, ...]:
    for port in ports:
        if not 1 <= port <= 65535 or port == ENVD_PORT:
            raise InvalidInputError("network.httpsPorts", f"{port} is not a port that can serve HTTPS")
    return tuple(ports)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= len(text) <= 5 and 1 <= int(text) <= 65535
