"""One slot: a namespace with a tap for one guest, a veth pair to the uplink, and the tables that stand between.

Every slot looks the same from inside the guest (addresses of `base.py`). Masquerading in the slot gives each guest the
slot's own transit address, so the uplink can tell slots apart although all guests have one address.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from socket import socket as Socket  # noqa: N812 - `Slot.socket` hides the name
from typing import TypeVar

from pyroute2 import IPRoute, NetlinkError

from aenv.errors import ConflictError, NotFoundError, UnavailableError
from aenv.network import namespace
from aenv.network.base import (
    GUEST_ADDRESS,
    GUEST_ADDRESS6,
    GUEST_MAC,
    HOST_ADDRESS,
    HOST_ADDRESS6,
    PREFIX_LENGTH,
    PREFIX_LENGTH6,
    TAP_MAC,
    TAP_NAME,
    Policy,
)
from aenv.network.nft import Nft
from aenv.network.policy import UPLINK_DEVICE, generation_in_force, render_base, render_policy
from aenv.network.uplink import IFA_F_NODAD, UplinkSide, device_name, remove_link, write_sysctl

T = TypeVar("T")

_TUN_DEVICE = "/dev/net/tun"
# linux/if_tun.h. The flags are the device's for life: an open with others is refused.
_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_NUD_PERMANENT = 0x80
_SYSCTLS = (
    ("ipv4/ip_forward", 1),
    ("ipv6/conf/all/forwarding", 1),
    ("ipv4/conf/all/rp_filter", 1),
    ("ipv4/conf/default/rp_filter", 1),
    ("ipv4/conf/all/accept_redirects", 0),
    ("ipv4/conf/all/send_redirects", 0),
    ("ipv6/conf/all/accept_redirects", 0),
    ("ipv6/conf/default/accept_ra", 0),
    ("ipv6/conf/default/addr_gen_mode", 1),  # none: no link-local address, so nothing is sent by itself
    # Every refused packet is told at once. With the usual limits (6 in a burst, then 1 a second) a guest without a way
    # out waits seconds for each name it looks up. Only the guest itself gets these answers: its source is checked.
    ("ipv4/icmp_ratelimit", 0),
    ("ipv6/icmp/ratelimit", 0),
    ("ipv4/conf/all/arp_ignore", 1),  # the tap answers for its own address only, not for the veth's
)


@dataclass(frozen=True, slots=True)
class Fabric:
    """What all slots of one pool share."""

    tag: str
    uplink: UplinkSide | None
    nft: Nft
    executor: Executor


class Slot:
    """A ready slot. `socket` and `tap_fd` hop into the namespace and back at once; all else runs in the executor."""

    def __init__(
        self, fabric: Fabric, index: int, handle: int, *, generation: int = 0, policy: Policy | None = None
    ) -> None:
        """`handle` becomes the slot's own. `policy`: what is in force, if known, with sets of `generation`."""
        self.index = index
        self.name = namespace.namespace_name(fabric.tag, index)
        self._fabric = fabric
        self._handle = handle
        self._generation = generation
        self._policy = policy
        self._changing = threading.Lock()

    def tap_fd(self) -> int:
        """Open the queue of the tap (with virtio-net headers). The caller closes it.

        Raises ConflictError while another descriptor of it is open.
        """
        device = namespace.open_in(self._open_handle(), _open_tun)
        try:
            _attach(device)
        except OSError as error:
            os.close(device)
            if error.errno == errno.EBUSY:
                raise ConflictError(f"the tap of {self.name} is in use by another VMM") from error
            raise
        return device

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> Socket:
        """A non-blocking socket made inside the namespace; it stays there for life."""
        return namespace.open_in(self._open_handle(), lambda: Socket(family, kind | socket.SOCK_NONBLOCK))

    async def connect(self, port: int, timeout: float) -> Socket:
        """A TCP connection to a port of the guest, non-blocking, with TCP_NODELAY.

        `timeout` in seconds. Raises ConnectionRefusedError, TimeoutError, OSError.
        """
        connection = self.socket()
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(timeout):
                await asyncio.get_running_loop().sock_connect(connection, (GUEST_ADDRESS, port))
        except BaseException:
            connection.close()
            raise
        return connection

    async def apply(self, policy: Policy) -> None:
        """Replace the egress rules at one moment; established flows that are now denied end. Free if nothing changes.

        Raises InvalidInputError (nothing changed), UnavailableError.
        """
        await asyncio.get_running_loop().run_in_executor(self._fabric.executor, self._apply, policy)

    def _apply(self, policy: Policy) -> None:
        with self._changing:
            handle = self._open_handle()
            if policy == self._policy:
                return
            generation = 1 - self._generation
            change = render_policy(policy, generation)
            with namespace.entered(handle):
                if change.fill:
                    self._fabric.nft.run(change.fill)
                self._fabric.nft.run(change.switch)
            self._generation, self._policy = generation, policy

    def _open_handle(self) -> int:
        if self._handle < 0:
            raise NotFoundError(f"network slot {self.name} is gone")
        return self._handle

    def close_handle(self) -> None:
        """Let go of the namespace and leave it as it is, for the next daemon to adopt."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def create_slot(fabric: Fabric, index: int) -> Slot:
    """Make everything of a slot. Blocks for tens of milliseconds: worker thread only.

    Raises UnavailableError; then nothing of the slot is left.
    """
    name = namespace.namespace_name(fabric.tag, index)
    with _translated(name), ExitStack() as undo:
        namespace.create(name)
        undo.callback(namespace.delete, name)
        slot = Slot(fabric, index, namespace.open_handle(name), policy=Policy())
        undo.callback(slot.close_handle)
        with namespace.entered(slot._open_handle()):
            _create_tap()
            for setting, value in _SYSCTLS:
                write_sysctl(setting, value)
            with IPRoute() as ip:
                _configure_tap(ip)
                fabric.nft.run(render_base())
                if fabric.uplink:
                    # Registered before the attempt: a half-made pair has its far end in another namespace already.
                    undo.callback(fabric.uplink.detach, index)
                    _create_veth(ip, fabric.uplink, device_name(fabric.tag, index))
                    fabric.uplink.attach(index)
                    _configure_veth(ip, fabric.uplink, index)
                else:
                    _configure_dead_end(ip)
        undo.pop_all()
    return slot


def adopt_slot(fabric: Fabric, index: int) -> Slot:
    """Take over a slot that an earlier daemon made, with the policy in force there. Worker thread only.

    A way out that this daemon's uplink does not have is cut. Raises NotFoundError.
    """
    name = namespace.namespace_name(fabric.tag, index)
    handle = namespace.open_handle(name)
    try:
        with _translated(name), namespace.entered(handle):
            devices = {device for _, device in socket.if_nameindex()}
            if TAP_NAME not in devices:
                raise NotFoundError(f"network namespace {name} has no {TAP_NAME}")
            if fabric.uplink is None and UPLINK_DEVICE in devices:
                with IPRoute() as ip:
                    remove_link(ip, UPLINK_DEVICE)
                    _configure_dead_end(ip)
            rules = fabric.nft.run("list chain inet aenv resolvers") + fabric.nft.run("list chain inet aenv addresses")
    except BaseException:
        os.close(handle)
        raise
    return Slot(fabric, index, handle, generation=generation_in_force(rules))


def delete_slot(fabric: Fabric, index: int) -> None:
    """Remove a slot, whoever made it and however far it got. Worker thread only, tens of milliseconds.

    The veth pair goes by name, so that its name is free when this returns. The tap is left to the end of the namespace
    (the kernel frees many at once, in the background) unless a VMM still holds it: its open descriptor would keep
    namespace and tap alive.
    """
    name = namespace.namespace_name(fabric.tag, index)
    with _translated(name):
        if fabric.uplink:
            fabric.uplink.detach(index)
        try:
            handle = namespace.open_handle(name)
        except NotFoundError:
            namespace.delete(name)
            return
        try:
            with namespace.entered(handle):
                left = {UPLINK_DEVICE, TAP_NAME} if _tap_in_use() else {UPLINK_DEVICE}
                left &= {device for _, device in socket.if_nameindex()}
                if left:
                    with IPRoute() as ip:
                        for device in left:
                            remove_link(ip, device)
        finally:
            os.close(handle)
        namespace.delete(name)


def _tap_in_use() -> bool:
    """Does another descriptor hold the tap's only queue? Makes no lasting device: one made here goes with the close."""
    device = _open_tun()
    try:
        _attach(device)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return True
        raise
    finally:
        os.close(device)
    return False


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Turn what the kernel says into UnavailableError."""
    try:
        yield
    except (NetlinkError, OSError) as error:
        raise UnavailableError(f"network slot {name}: {error}") from error


def _open_tun() -> int:
    """The descriptor belongs to the namespace of the thread that opens it, whoever attaches it (tun_chr_open)."""
    return os.open(_TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)


def _attach(device: int, name: str = TAP_NAME) -> None:
    request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR)
    fcntl.ioctl(device, _TUNSETIFF, request)


def _create_tap() -> None:
    device = _open_tun()
    try:
        _attach(device)
        fcntl.ioctl(device, _TUNSETPERSIST, 1)
    finally:
        os.close(device)


def _configure_tap(ip: IPRoute) -> None:
    tap = socket.if_nametoindex(TAP_NAME)
    ip.link("set", index=socket.if_nametoindex("lo"), state="up")
    ip.link("set", index=tap, address=TAP_MAC, state="up")
    ip.addr("add", index=tap, address=HOST_ADDRESS, prefixlen=PREFIX_LENGTH)
    ip.addr("add", index=tap, address=HOST_ADDRESS6, prefixlen=PREFIX_LENGTH6, flags=IFA_F_NODAD)
    for address in (GUEST_ADDRESS, GUEST_ADDRESS6):
        # Permanent: the first packet to a restored guest goes out at once, and the guest cannot point it elsewhere.
        ip.neigh("add", ifindex=tap, dst=address, lladdr=GUEST_MAC, state=_NUD_PERMANENT)


def _create_veth(ip: IPRoute, uplink: UplinkSide, far: str) -> None:
    ip.link("add", ifname=UPLINK_DEVICE, kind="veth", peer={"ifname": far, "net_ns_fd": uplink.handle})


def _configure_veth(ip: IPRoute, uplink: UplinkSide, index: int) -> None:
    device, addresses = socket.if_nametoindex(UPLINK_DEVICE), uplink.transit(index)
    ip.link("set", index=device, state="up")
    ip.addr("add", index=device, address=addresses.near, prefixlen=30)
    ip.route("add", dst="default", gateway=addresses.far, oif=device)
    if uplink.ipv6:
        ip.addr("add", index=device, address=addresses.near6, prefixlen=126, flags=IFA_F_NODAD)
        ip.route("add", dst="default", family=socket.AF_INET6, gateway=addresses.far6, oif=device)


def _configure_dead_end(ip: IPRoute) -> None:
    """Without a way out: send IPv4 through the forward chain, which refuses it. Where there is no route the kernel
    answers for itself, at a rate of its own that no setting lifts (ip_error in net/ipv4/route.c; IPv6 has no such)."""
    ip.route("add", dst="0.0.0.0/0", scope="link", oif=socket.if_nametoindex("lo"))


def install_trial(nft: Nft) -> None:
    """Make a tap and install a slot's tables in the calling thread's namespace, which must be a throw-away one."""
    _create_tap()
    nft.run(render_base())


async def in_worker(fabric: Fabric, action: Callable[[Fabric, int], T], index: int) -> T:
    """Run one of the functions above in the fabric's executor."""
    return await asyncio.get_running_loop().run_in_executor(fabric.executor, action, fabric, index)
