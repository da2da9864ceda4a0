"""What the rest of the system needs to know of a sandbox's network. Every slot looks the same from inside the guest."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

GUEST_ADDRESS = "169.254.0.21"  # the same in every slot, so memory images need no change
HOST_ADDRESS = "169.254.0.22"  # tap side of the same /30
PREFIX_LENGTH = 30
GUEST_ADDRESS6 = "fd00:ae::21"
HOST_ADDRESS6 = "fd00:ae::22"
PREFIX_LENGTH6 = 64
GUEST_MAC = "02:ae:00:00:00:21"
TAP_MAC = "02:ae:00:00:00:22"  # fixed, so the neighbour entry inside a memory image stays right in every slot
TAP_NAME = "tap0"
DEFAULT_DNS = ("8.8.8.8", "1.1.1.1")


class UplinkKind(enum.StrEnum):
    HOST = "host"  # NAT through the host's own namespace
    NONE = "none"  # no way out at all
    NETNS = "netns"  # NAT through a named namespace


@dataclass(frozen=True, slots=True)
class Uplink:
    """The way out of a sandbox. `name` is the namespace for `netns:NAME`, else empty."""

    kind: UplinkKind
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Uplink:
        """`host`, `none` or `netns:NAME`. Raises ValueError."""
        kind, _, name = text.partition(":")
        if kind == "netns" and name and "/" not in name:
            return cls(UplinkKind.NETNS, name)
        if text in ("host", "none"):
            return cls(UplinkKind(text))
        raise ValueError(f"expected host, none or netns:NAME, got {text!r}")


@dataclass(frozen=True, slots=True)
class Policy:
    """Egress rules of one sandbox; CIDR strings of either family. `allow` beats `deny`; built-in denials beat both.

    `dns`: the only addresses port 53 may be reached at; they must be public and obey `allow` and `deny` as well.
    """

    allow: tuple[str, ...] = field(default=())
    deny: tuple[str, ...] = field(default=())
    internet: bool = True
    dns: tuple[str, ...] = field(default=DEFAULT_DNS)
