"""A closed world for network tests: an `internet` namespace behind an `uplink` namespace, and guests made of a tap.

Nothing here has a route out of these namespaces. The stand-in addresses exist in the internet namespace only.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import secrets
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop
from pyroute2 import IPRoute

from aenv.network import namespace
from aenv.network.base import (
    GUEST_ADDRESS,
    GUEST_ADDRESS6,
    GUEST_MAC,
    HOST_ADDRESS,
    HOST_ADDRESS6,
    PREFIX_LENGTH,
    PREFIX_LENGTH6,
)
from aenv.network.slot import Slot, _attach, _open_tun
from aenv.network.uplink import write_sysctl
from tests.leftovers import CLAIMS

PUBLIC, PUBLIC2, PUBLIC6, PUBLIC6B = "198.51.100.7", "203.0.113.9", "2001:db8::7", "2001:db8:1::9"
RESOLVER = "8.8.8.8"
FORBIDDEN = ("10.1.2.3", "172.16.5.6", "192.168.7.8", "169.254.169.254", "100.64.0.9", "198.18.0.1", "192.0.0.8")
FORBIDDEN6 = ("fd00:ec2::254", "fc00::5", "64:ff9b::a01:203", "2002:a01:203::1", "2001::9", "4000::1")
UPLINK_ADDRESS, UPLINK_ADDRESS6 = "203.0.113.1", "2001:db8:ff::1"
PORT = 8080


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Internet:
    """The uplink namespace and, behind it, one with all stand-in addresses and a server that answers on any of them.

    The TCP server sends the client's address as it sees it, then echoes. The UDP server collects what it gets.
    """

    def __init__(self) -> None:
        mark = CLAIMS.mark(secrets.token_hex(3))
        self.uplink, self.outside = f"test-up-{mark}", f"test-net-{mark}"
        self._stack = contextlib.ExitStack()
        for name in (self.uplink, self.outside):
            namespace.create(name)
            self._stack.callback(namespace.delete, name)
        self.uplink_handle, self.handle = (namespace.open_handle(n) for n in (self.uplink, self.outside))
        self._stack.callback(os.close, self.uplink_handle)
        self._stack.callback(os.close, self.handle)
        self.datagrams: list[bytes] = []
        self._arrived = threading.Condition()
        self._wire()
        self._stop, self._wake = os.pipe()
        self._sockets: list[socket.socket] = []
        with namespace.entered(self.handle):
            for port in (PORT, 53):
                self._sockets += [
                    socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True),
                    self._datagram_socket(port),
                ]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _wire(self) -> None:
        with namespace.entered(self.handle):
            write_sysctl("ipv6/conf/default/accept_dad", 0)
            write_sysctl("ipv6/conf/all/accept_dad", 0)
            with IPRoute() as ip:
                ip.link("set", index=1, state="up")
                peer = {"ifname": "out", "net_ns_fd": self.uplink_handle}
                ip.link("add", ifname="in", kind="veth", peer=peer)
                link = socket.if_nametoindex("in")
                ip.link("set", index=link, state="up")
                ip.addr("add", index=link, address="203.0.113.2", prefixlen=30)
                ip.addr("add", index=link, address="2001:db8:ff::2", prefixlen=64, flags=2)
                for address in (PUBLIC, PUBLIC2, RESOLVER, "9.9.9.9", *FORBIDDEN):
                    ip.addr("add", index=1, address=address, prefixlen=32)
                for address in (PUBLIC6, PUBLIC6B, *FORBIDDEN6):
                    ip.addr("add", index=1, address=address, prefixlen=128, flags=2)
        with namespace.entered(self.uplink_handle), IPRoute() as ip:
            link = socket.if_nametoindex("out")
            ip.link("set", index=1, state="up")
            ip.link("set", index=link, state="up")
            ip.addr("add", index=link, address=UPLINK_ADDRESS, prefixlen=30)
            ip.addr("add", index=link, address=UPLINK_ADDRESS6, prefixlen=64, flags=2)
            ip.route("add", dst="default", gateway="203.0.113.2", oif=link)
            ip.route("add", dst="default", family=socket.AF_INET6, gateway="2001:db8:ff::2", oif=link)

    @staticmethod
    def _datagram_socket(port: int) -> socket.socket:
        made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(("::", port))
        return made

    def _serve(self) -> None:
        clients: list[socket.socket] = []
        while True:
            ready, _, _ = select.select([self._stop, *self._sockets, *clients], [], [])
            for source in ready:
                if source == self._stop:
                    for client in clients:
                        client.close()
                    return
                if source in clients:
                    self._echo(source, clients)
                elif source.type == socket.SOCK_DGRAM:
                    with self._arrived:
                        self.datagrams.append(source.recv(2048))
                        self._arrived.notify_all()
                else:
                    client, address = source.accept()
                    client.sendall(f"{address[0].removeprefix('::ffff:')}\n".encode())
                    clients.append(client)

    @staticmethod
    def _echo(client: socket.socket, clients: list[socket.socket]) -> None:
        try:
            data = client.recv(2048)
            client.sendall(data)
        except OSError:
            data = b""
        if not data:
            clients.remove(client)
            client.close()

    def wait_datagram(self, wanted: bytes) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: wanted in self.datagrams, 20), self.datagrams

    def close(self) -> None:
        os.write(self._wake, b"x")
        self._thread.join()
        os.close(self._stop)
        os.close(self._wake)
        for item in self._sockets:
            item.close()
        self._stack.close()


class Guest:
    """Stands for a VM: the slot's tap on one side, a tap `eth0` in a namespace of its own on the other.

    Frames (with their virtio-net headers) are copied by a thread, so the slot's own tap and tables are under test.
    """

    def __init__(self, slot: Slot) -> None:
        self.name = f"test-guest-{CLAIMS.mark(secrets.token_hex(3))}"
        namespace.create(self.name)
        self.handle = namespace.open_handle(self.name)
        self._tap = slot.tap_fd()
        with ThreadPoolExecutor(1) as executor:  # pyroute2 needs a thread without a running event loop
            executor.submit(self._wire).result()
        self._stop, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._relay)
        self._thread.start()

    def _wire(self) -> None:
        with namespace.entered(self.handle):
            self._eth = _open_tun()
            _attach(self._eth, "eth0")
            write_sysctl("ipv6/conf/eth0/addr_gen_mode", 1)
            with IPRoute() as ip:
                link = socket.if_nametoindex("eth0")
                ip.link("set", index=1, state="up")
                ip.link("set", index=link, address=GUEST_MAC, state="up")
                ip.addr("add", index=link, address=GUEST_ADDRESS, prefixlen=PREFIX_LENGTH)
                ip.addr("add", index=link, address=GUEST_ADDRESS6, prefixlen=PREFIX_LENGTH6, flags=2)
                ip.route("add", dst="default", gateway=HOST_ADDRESS, oif=link)
                ip.route("add", dst="default", family=socket.AF_INET6, gateway=HOST_ADDRESS6, oif=link)

    def _relay(self) -> None:
        other = {self._tap: self._eth, self._eth: self._tap}
        while True:
            for source in select.select([self._stop, *other], [], [])[0]:
                if source == self._stop:
                    return
                try:
                    os.write(other[source], os.read(source, 65600))
                except BlockingIOError:
                    continue
                except OSError as error:
                    if error.errno not in (errno.EBADFD, errno.EIO):
                        raise
                    return  # the slot's tap has been removed

    def inject(self, frame: bytes) -> None:
        """Send a raw Ethernet frame as a guest could, past the guest's kernel."""
        os.write(self._tap, bytes(10) + frame)

    def socket(self, family: int, kind: int) -> socket.socket:
        made = namespace.open_in(self.handle, lambda: socket.socket(family, kind))
        made.settimeout(20)
        return made

    def connect(self, address: str, port: int = PORT) -> socket.socket:
        made = self.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.connect((address, port))
        except BaseException:
            made.close()
            raise
        return made

    def reaches(self, address: str, port: int = PORT) -> bool:
        """Does a TCP connection come about? A refusal must be told by an ICMP error, not by silence."""
        try:
            connection = self.connect(address, port)
        except TimeoutError:
            raise
        except OSError:
            return False
        with connection:
            return bool(connection.recv(100))

    def send(self, address: str, payload: bytes, port: int = PORT) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with self.socket(family, socket.SOCK_DGRAM) as made:
            made.sendto(payload, (address, port))

    def close(self) -> None:
        os.write(self._wake, b"x")
        self._thread.join()
        for fd in (self._stop, self._wake, self._tap, self._eth, self.handle):
            os.close(fd)
        namespace.delete(self.name)


@pytest.fixture
def tag() -> str:
    """A home tag of this test's own."""
    return CLAIMS.mark(secrets.token_hex(3))


@pytest.fixture(autouse=True)
def nothing_left(tag: str) -> Iterator[None]:
    """After a test nothing of it is left: names, devices, tables, descriptors, threads."""
    uvloop.new_event_loop().close()  # the first one in a process makes a pipe that stays
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    gc.collect()
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    if os.geteuid() == 0:
        assert namespace.list_indices(tag) == []
        assert f"ae{tag}-" not in _run("ip", "-brief", "link")
        assert f"aenv_{tag}" not in _run("nft", "list", "tables")


@pytest.fixture
def internet(nothing_left: None) -> Iterator[Internet]:
    made = Internet()
    yield made
    tables, links = (
        _run("ip", "netns", "exec", made.uplink, *command) for command in (("nft", "list", "tables"), ("ip", "link"))
    )
    made.close()
    assert "aenv_" not in tables
    assert "@" not in links.replace("out@", "")
