"""What a guest may reach, as nft scripts. Pure text: nothing here touches the kernel.

A slot's namespace holds two tables. `netdev aenv` sees every frame the guest sends before anything else does and drops
what does not carry the guest's own addresses. `inet aenv` holds the rules of docs/network.md for IPv4 and IPv6.

Only the chains `resolvers` and `addresses` change when a policy does: their rules are exchanged in one transaction, and
no hook is registered anew, so no packet meets half a policy or none.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aenv.errors import InvalidInputError
from aenv.network.base import GUEST_ADDRESS, GUEST_ADDRESS6, GUEST_MAC, TAP_NAME, Policy

UPLINK_DEVICE = "up0"  # the slot's end of the veth pair
MAX_ENTRIES = 10_000  # of one list
INLINE_ENTRIES = 8  # of one list and family that are rules rather than a set: a set costs a transaction more
MAX_CONNECTIONS = 4096  # of one guest through the uplink at a time: they fill the uplink's conntrack table too

# IANA special-purpose registries (RFC 6890 and successors). The documentation ranges are left out: nothing is ever
# there, and closed test networks use them as stand-ins for the Internet.
BUILT_IN_DENIED = (
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",  # private
    "100.64.0.0/10",  # shared (CGNAT); holds the slots' transit addresses
    "127.0.0.0/8",  # loopback
    "169.254.0.0/16",  # link-local: metadata services, the guest link itself
    "172.16.0.0/12",  # private
    "192.0.0.0/24",  # protocol assignments
    "192.88.99.0/24",  # 6to4 relays
    "192.168.0.0/16",  # private
    "198.18.0.0/15",  # benchmarking
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved and broadcast
)
# Only 2000::/3 is global unicast. The three complements hold ::1, IPv4-mapped (::ffff:0:0/96), NAT64 (64:ff9b::/96),
# unique local (fc00::/7, with AWS's fd00:ec2::254), link-local (fe80::/10) and multicast (ff00::/8).
BUILT_IN_DENIED6 = (
    "::/3",
    "4000::/2",
    "8000::/1",
    "2001::/32",  # Teredo: carries IPv4 addresses
    "2001:10::/28",  # ORCHID
    "2001:20::/28",  # ORCHIDv2
    "2002::/16",  # 6to4: carries IPv4 addresses
)

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_ENTRY = re.compile(r"[0-9a-fA-F:.]{2,45}(/[0-9]{1,3})?")


def parse_networks(field: str, entries: Sequence[object]) -> list[_Network]:
    """Addresses and CIDRs of either family. Host bits are masked off.

    Raises InvalidInputError that names `field`, the position and the entry.
    """
    if len(entries) > MAX_ENTRIES:
        raise InvalidInputError(field, f"{len(entries)} entries, at most {MAX_ENTRIES} are allowed")
    return [_parse_network(f"{field}[{i}]", entry) for i, entry in enumerate(entries)]


def _parse_network(field: str, entry: object) -> _Network:
    shown = repr(entry)[:80]
    if not isinstance(entry, str) or not _ENTRY.fullmatch(entry):
        raise InvalidInputError(field, f"{shown} is not an IP address or CIDR")
    try:
        network = ipaddress.ip_network(entry, strict=False)
    except ValueError as error:
        raise InvalidInputError(field, f"{shown} is not an IP address or CIDR") from error
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        raise InvalidInputError(field, f"{shown} is an IPv4-mapped address", hint="write the IPv4 address")
    return network


def parse_resolvers(field: str, entries: Sequence[object]) -> list[_Network]:
    """Single public addresses. Raises InvalidInputError: a resolver in a denied range could never be reached."""
    networks = parse_networks(field, entries)
    denied = [ipaddress.ip_network(n) for n in BUILT_IN_DENIED + BUILT_IN_DENIED6]
    for i, network in enumerate(networks):
        if network.prefixlen != network.max_prefixlen:
            raise InvalidInputError(f"{field}[{i}]", f"{entries[i]!r} is not a single address")
        if any(network.version == d.version and network.subnet_of(d) for d in denied):  # type: ignore[arg-type]
            raise InvalidInputError(f"{field}[{i}]", f"{entries[i]!r} is not a public address")
    return networks


def validate(policy: Policy) -> None:
    """Raises InvalidInputError for the first bad entry."""
    render_policy(policy, 0)


def render_base() -> str:
    """Both tables, made anew with the default policy (generation 0). Also right when older tables exist."""
    default = render_policy(Policy(), 0)
    return f"""
table inet aenv
delete table inet aenv
table netdev aenv
delete table netdev aenv
table netdev aenv {{
    chain guest {{
        type filter hook ingress device "{TAP_NAME}" priority -500; policy drop;
        ether saddr != {GUEST_MAC} drop
        meta protocol arp arp saddr ether {GUEST_MAC} arp saddr ip {GUEST_ADDRESS} accept
        ip saddr {GUEST_ADDRESS} accept
        ip6 saddr {GUEST_ADDRESS6} accept
        ip6 saddr :: icmpv6 type nd-neighbor-solicit accept
    }}
}}
table inet aenv {{
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname "lo" accept
        iifname "{TAP_NAME}" ct direction reply ct state established,related accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        iifname "{TAP_NAME}" goto refuse
    }}
    chain output {{
        type filter hook output priority filter; policy drop;
        oifname "lo" accept
        oifname "{TAP_NAME}" ip daddr {GUEST_ADDRESS} accept
        oifname "{TAP_NAME}" ip6 daddr {GUEST_ADDRESS6} accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        oifname "{UPLINK_DEVICE}" icmp type {{ destination-unreachable, time-exceeded, parameter-problem }} accept
        oifname "{UPLINK_DEVICE}" icmpv6 type {{
            destination-unreachable, packet-too-big, time-exceeded, parameter-problem }} accept
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        ct state invalid drop
        iifname "{TAP_NAME}" oifname "{UPLINK_DEVICE}" ct direction original goto egress
        iifname "{UPLINK_DEVICE}" oifname "{TAP_NAME}" ct direction reply ct state established,related goto egress
        iifname "{TAP_NAME}" goto refuse
    }}
    chain egress {{
        ct original ip daddr {_set(BUILT_IN_DENIED)} goto refuse
        ct original ip6 daddr {_set(BUILT_IN_DENIED6)} goto refuse
        ct state new ct count over {MAX_CONNECTIONS} goto refuse
        meta l4proto {{ tcp, udp }} ct direction original th dport 53 jump resolvers
        meta l4proto {{ tcp, udp }} ct direction reply th sport 53 jump resolvers
        goto addresses
    }}
    chain resolvers {{
    }}
    chain addresses {{
    }}
    chain refuse {{
        iifname != "{TAP_NAME}" drop
        ct state new reject with icmpx admin-prohibited
        meta l4proto tcp reject with tcp reset
        reject with icmpx admin-prohibited
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname "{UPLINK_DEVICE}" masquerade
    }}
}}
{default.fill}{default.switch}"""


@dataclass(frozen=True, slots=True)
class Change:
    """A policy as two transactions: `fill` (may be empty) makes sets no rule uses yet, `switch` exchanges the rules.

    One transaction would do on paper. But while the kernel commits it there are moments in which a lookup in a new
    interval set finds nothing (6.18: some packets of 100,000 slipped past a deny list), so the sets must be whole
    before a rule refers to them.
    """

    fill: str
    switch: str


def render_policy(policy: Policy, generation: int) -> Change:
    """Rules of the chains `resolvers` and `addresses`. `generation` (0 or 1) must be the one that is not in force.

    Matches look at the destination of the flow's first packet (`ct original`), so they hold for packets of both
    directions, and a flow that is now denied ends at once. Raises InvalidInputError for a bad entry.
    """
    allow = parse_networks("allow", policy.allow)
    deny = parse_networks("deny", policy.deny)
    resolvers = parse_resolvers("dns", policy.dns)
    if any(n.version == 4 and n.prefixlen == 0 for n in deny):
        deny.append(ipaddress.ip_network("::/0"))  # "all traffic" in the E2B API, which knows IPv4 only
    fill: list[str] = []
    chains = {
        "resolvers": [*_matches("dns", generation, resolvers, "return", fill), "goto refuse"],
        "addresses": [
            *_matches("allow", generation, allow, "accept", fill),
            *_matches("deny", generation, deny, "goto refuse", fill),
            "accept" if policy.internet else "goto refuse",
        ],
    }
    switch = [f"flush chain inet aenv {chain}" for chain in chains]
    switch += [f"add rule inet aenv {chain} {rule}" for chain, rules in chains.items() for rule in rules]
    return Change(_script(fill), _script(switch))


def _script(commands: Iterable[str]) -> str:
    return "".join(f"{command}\n" for command in commands)


def generation_in_force(listing: str) -> int:
    """Which generation of sets the chains refer to, from nft's listing of them; 0 when to none."""
    found = re.search(r"@(?:dns|allow|deny)[46]_([01])\b", listing)
    return int(found[1]) if found else 0


def _matches(name: str, generation: int, networks: Sequence[_Network], verdict: str, fill: list[str]) -> list[str]:
    """The rules for `networks`. Many become a set a family, and the commands that make it are added to `fill`.

    Overlaps, which an interval set refuses, are merged here.
    """
    four = ipaddress.collapse_addresses(n for n in networks if isinstance(n, ipaddress.IPv4Network))
    six = ipaddress.collapse_addresses(n for n in networks if isinstance(n, ipaddress.IPv6Network))
    rules = []
    for family, protocol, found in ((4, "ip", list(map(str, four))), (6, "ip6", list(map(str, six)))):
        if found and found[0].endswith("/0"):
            rules.append(f"meta nfproto ipv{family} {verdict}")
        elif len(found) <= INLINE_ENTRIES:
            rules += [f"ct original {protocol} daddr {network} {verdict}" for network in found]
        else:
            kind = f"type ipv{family}_addr; flags interval;"
            table_set = f"inet aenv {name}{family}_{generation}"
            fill += [
                f"add set {table_set} {{ {kind} }}",
                f"delete set {table_set}",
                f"add set {table_set} {{ {kind} elements = {_set(found)}; }}",
            ]
            rules.append(f"ct original {protocol} daddr @{name}{family}_{generation} {verdict}")
    return rules


def _set(elements: Iterable[str]) -> str:
    return "{ " + ", ".join(elements) + " }"


def render_uplink(table: str, device_prefix: str, transit: str, transit6: str) -> str:
    """The table of one daemon in the uplink namespace: NAT for its transit addresses, and guests reach neither this
    namespace, nor each other, nor what it forwards to by DNAT (published ports of containers)."""
    ours = f'"{device_prefix}*"'
    return f"""
table inet {table}
delete table inet {table}
table inet {table} {{
    chain input {{
        type filter hook input priority filter; policy accept;
        iifname {ours} icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        iifname {ours} drop
    }}
    chain forward {{
        type filter hook forward priority filter; policy accept;
        iifname {ours} oifname {ours} drop
        iifname {ours} ct status dnat drop
        iifname {ours} accept
        oifname {ours} ct direction reply ct state established,related accept
        oifname {ours} drop
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {transit} oifname != {ours} masquerade
        ip6 saddr {transit6} oifname != {ours} masquerade
    }}
}}
"""


def render_removal(table: str) -> str:
    """Remove `table`, which may or may not exist."""
    return f"table inet {table}\ndelete table inet {table}\n"
