"""The far end of the slots' veth pairs: the namespace that carries guests' packets out (the host's, or a named one).

With `Uplink.NONE` there is no such end and nothing outside the slots' own namespaces is read or changed.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pyroute2 import IPRoute, NetlinkError

from aenv.errors import InvalidInputError, NotFoundError, UnavailableError
from aenv.network import namespace
from aenv.network.base import Uplink, UplinkKind
from aenv.network.nft import Nft
from aenv.network.policy import render_removal, render_uplink

# Transit addresses are seen only between a slot and its uplink. The range lies in the shared address space of RFC 6598,
# which no site's own network may use; each daemon takes one /16 of it: room for 16384 slots of one /30.
DEFAULT_TRANSIT = "100.96.0.0/12"
BLOCK_PREFIX = 16
MAX_SLOTS = 1 << (30 - BLOCK_PREFIX)
_TRANSIT6 = ipaddress.IPv6Network("fd00:ae::/48")  # one /64 a block; the first is the guest link's own

IFA_F_NODAD = 0x02  # linux/if_addr.h: no duplicate address detection, the address is usable at once
_SYSCTL = Path("/proc/sys/net")  # shows the namespace of the thread that opens a file in it


@dataclass(frozen=True, slots=True)
class Transit:
    """Addresses of one slot's veth pair."""

    near: str  # in the slot's namespace
    far: str  # in the uplink's
    near6: str
    far6: str


def read_sysctl(name: str) -> str:
    """A setting of the calling thread's namespace, as text. `name` is a path below `/proc/sys/net`."""
    return (_SYSCTL / name).read_text().strip()


def write_sysctl(name: str, value: int) -> None:
    (_SYSCTL / name).write_text(str(value))


def table_name(tag: str) -> str:
    """The daemon's table in the uplink namespace."""
    return f"aenv_{tag}"


def device_prefix(tag: str) -> str:
    return f"ae{tag}-"


def device_name(tag: str, index: int) -> str:
    """The far end of a slot's veth pair."""
    return f"{device_prefix(tag)}{index}"


def max_index(tag: str) -> int:
    """The largest index whose device name has at most 15 characters (IFNAMSIZ less the final zero)."""
    return int("9" * (15 - len(device_prefix(tag))))


def remove_link(ip: IPRoute, name: str) -> None:
    """Remove a device of the namespace `ip` was opened in. No-op when there is none."""
    try:
        ip.link("del", ifname=name)
    except NetlinkError as error:
        if error.code != errno.ENODEV:
            raise


def _parse_transit(text: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise InvalidInputError("network.transit", f"{text!r} is not an IPv4 network") from error
    if network.prefixlen > BLOCK_PREFIX:
        raise InvalidInputError("network.transit", f"{text} is smaller than a /{BLOCK_PREFIX}")
    return network


def _claim_block(tag: str, network: ipaddress.IPv4Network) -> tuple[ipaddress.IPv4Network, socket.socket]:
    """The block this daemon's veths already have, else the first one from the tag's hash on that nobody uses.

    A block is in use when a device has an address of it, or when a daemon holds its claim: an abstract Unix socket,
    which belongs to the network namespace and ends with its process (unix(7), network_namespaces(7)).
    """
    own, taken = None, set()
    with IPRoute() as ip:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in ip.get_links()}
        for entry in ip.get_addr(family=socket.AF_INET):
            block = ipaddress.IPv4Network((entry.get_attr("IFA_ADDRESS"), BLOCK_PREFIX), strict=False)
            taken.add(block)
            if names.get(entry["index"], "").startswith(device_prefix(tag)) and block.subnet_of(network):
                own = block
    if own:
        if claim := _try_claim(own):
            return own, claim
        raise UnavailableError("another daemon with the same home directory is running")
    blocks = list(network.subnets(new_prefix=BLOCK_PREFIX))
    first = int(tag, 16) % len(blocks)
    for block in blocks[first:] + blocks[:first]:
        if block not in taken and (claim := _try_claim(block)):
            return block, claim
    raise UnavailableError(f"all transit addresses of {network} are in use")


def _try_claim(block: ipaddress.IPv4Network) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0aenv-transit-{block}")
    except OSError as error:
        claim.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return claim


class UplinkSide:
    """The uplink's end of one daemon. `open` blocks (worker thread); so do all other methods."""

    def __init__(
        self,
        tag: str,
        handle: int,
        transit: ipaddress.IPv4Network,
        nft: Nft,
        *,
        ipv6: bool,
        claim: socket.socket,
    ) -> None:
        """`transit` is the daemon's /16, `claim` keeps it; `ipv6` tells whether the uplink forwards IPv6."""
        self.handle = handle
        self._claim = claim
        self.ipv6 = ipv6
        self._tag = tag
        self._nft = nft
        self._transit = transit
        block = (int(transit.network_address) >> (32 - BLOCK_PREFIX)) & 0xFFFF
        self._transit6 = ipaddress.IPv6Network((int(_TRANSIT6.network_address) + (block << 64), 64))

    @classmethod
    def open(cls, uplink: Uplink, tag: str, nft: Nft, transit: str = DEFAULT_TRANSIT) -> UplinkSide | None:
        """Turn on forwarding in the uplink namespace and install this daemon's table there. None for `none`.

        Raises InvalidInputError (no such namespace), UnavailableError.
        """
        network = _parse_transit(transit)
        if uplink.kind is UplinkKind.NONE:
            return None
        if uplink.kind is UplinkKind.NETNS:
            try:
                handle = namespace.open_handle(uplink.name)
            except NotFoundError as error:
                raise InvalidInputError("network.uplink", error.message, hint=f"ip netns add {uplink.name}") from error
        else:
            handle = namespace.open_current()
        with ExitStack() as undo:
            undo.callback(os.close, handle)
            with namespace.entered(handle):
                block, claim = _claim_block(tag, network)
                undo.callback(claim.close)
                ipv6 = read_sysctl("ipv6/conf/all/forwarding") == "1"
                # The host's IPv6 forwarding is left as it is: turning it on makes a host ignore router
                # advertisements (ip-sysctl: accept_ra) and may cost it its own default route.
                if uplink.kind is UplinkKind.NETNS and not ipv6:
                    write_sysctl("ipv6/conf/all/forwarding", 1)
                    ipv6 = True
                side = cls(tag, handle, block, nft, ipv6=ipv6, claim=claim)
                if read_sysctl("ipv4/ip_forward") != "1":
                    write_sysctl("ipv4/ip_forward", 1)
                nft.run(render_uplink(table_name(tag), device_prefix(tag), str(side._transit), str(side._transit6)))
            undo.pop_all()
        return side

    def transit(self, index: int) -> Transit:
        """The addresses of slot `index`: the two of a /30 and the two of a /126."""
        four, six = int(self._transit.network_address) + 4 * index, int(self._transit6.network_address) + 4 * index
        return Transit(
            near=str(ipaddress.IPv4Address(four + 2)),
            far=str(ipaddress.IPv4Address(four + 1)),
            near6=str(ipaddress.IPv6Address(six + 2)),
            far6=str(ipaddress.IPv6Address(six + 1)),
        )

    def attach(self, index: int) -> None:
        """Configure the far end of a veth pair that has just been made, and set it up."""
        device, addresses = device_name(self._tag, index), self.transit(index)
        with namespace.entered(self.handle):
            write_sysctl(f"ipv4/conf/{device}/rp_filter", 1)
            for name, value in (("accept_ra", 0), ("addr_gen_mode", 1)):
                write_sysctl(f"ipv6/conf/{device}/{name}", value)
            link = socket.if_nametoindex(device)
            with IPRoute() as ip:
                ip.link("set", index=link, state="up")
                ip.addr("add", index=link, address=addresses.far, prefixlen=30)
                if self.ipv6:
                    ip.addr("add", index=link, address=addresses.far6, prefixlen=126, flags=IFA_F_NODAD)

    def detach(self, index: int) -> None:
        """Remove the veth pair of a slot, both ends. No-op when there is none."""
        with namespace.entered(self.handle), IPRoute() as ip:
            remove_link(ip, device_name(self._tag, index))

    def sweep(self, keep: set[int]) -> None:
        """Remove this daemon's veth pairs except those of `keep`."""
        pattern = re.compile(re.escape(device_prefix(self._tag)) + r"([0-9]+)")
        with namespace.entered(self.handle), IPRoute() as ip:
            names = [link.get_attr("IFLA_IFNAME") for link in ip.get_links()]
            for name in names:
                match = pattern.fullmatch(name)
                if match and int(match[1]) not in keep:
                    remove_link(ip, name)

    def close(self, *, remove_table: bool) -> None:
        """Close the handle. The table stays while slots that use it stay.

        Forwarding stays on: nothing tells whether others rely on it by now.
        """
        if self.handle < 0:
            return
        try:
            if remove_table:
                with namespace.entered(self.handle):
                    self._nft.run(render_removal(table_name(self._tag)))
        finally:
            self._claim.close()
            os.close(self.handle)
            self.handle = -1
