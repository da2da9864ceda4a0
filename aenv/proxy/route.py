"""Which sandbox and port a request is for: by host name, or by headers where the host name says nothing.

The rules are those of E2B's public proxy: `<port>-<id>.<anything>` in the left-most label of Host; the headers
`E2b-Sandbox-Id` and `E2b-Sandbox-Port` only when Host is `localhost`, an IP address or `sandbox.<domain>`, so that a
page on one sandbox's host name cannot reach into another sandbox.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from aenv.http.message import HttpError, Request

ID_HEADER = "E2b-Sandbox-Id"
PORT_HEADER = "E2b-Sandbox-Port"

_ID = re.compile(r"[a-z0-9]{1,64}")
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_LABEL = re.compile(r"([0-9]+)-(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Route:
    """A port of a sandbox."""

    sandbox_id: str
    port: int


def route(request: Request, domain: str | None = None) -> Route | None:
    """The sandbox port a request is for, or None for the control plane. `domain` is the configured domain, with or
    without a port. Raises HttpError 400."""
    host = host_name(request.headers.get("host") or "")
    label, dot, _ = host.partition(".")
    match = _LABEL.fullmatch(label) if dot and not _is_address(host) else None
    if match is not None:
        return Route(_sandbox_id(match[2], "Host"), _port(match[1], "Host"))
    if not _allows_headers(host, host_name(domain) if domain else None):
        return None
    ids, ports = request.headers.get_all(ID_HEADER), request.headers.get_all(PORT_HEADER)
    if not ids and not ports:
        return None
    if len(ids) != 1 or len(ports) != 1:
        raise HttpError(400, f"{ID_HEADER} and {PORT_HEADER} must both be given, once")
    return Route(_sandbox_id(ids[0], ID_HEADER), _port(ports[0], PORT_HEADER))


def host_name(authority: str) -> str:
    """The lower-case host of `host[:port]`, without brackets and trailing dot."""
    authority = authority.lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _allows_headers(host: str, domain: str | None) -> bool:
    return host == "localhost" or (domain is not None and host == f"sandbox.{domain}") or _is_address(host)


def _sandbox_id(text: str, where: str) -> str:
    if not _ID.fullmatch(text):
        raise HttpError(400, f"{where}: invalid sandbox id")
    return text


def _port(text: str, where: str) -> int:
    if not _PORT.fullmatch(text) or not 1 <= int(text) <= 65535:
        raise HttpError(400, f"{where}: invalid port, expected 1 to 65535")
    return int(text)
