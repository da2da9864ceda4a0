"""What a guest reaches and what it does not, with the real tables, tap and NAT."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from aenv.errors import InvalidInputError
from aenv.network import namespace
from aenv.network.base import (
    GUEST_ADDRESS,
    GUEST_ADDRESS6,
    GUEST_MAC,
    HOST_ADDRESS,
    HOST_ADDRESS6,
    TAP_MAC,
    Policy,
    Uplink,
)
from aenv.network.nft import Nft
from aenv.network.policy import INLINE_ENTRIES, MAX_CONNECTIONS
from aenv.network.slot import Fabric, Slot, adopt_slot, create_slot, delete_slot
from aenv.network.uplink import UplinkSide
from tests.network.conftest import (
    FORBIDDEN,
    FORBIDDEN6,
    PORT,
    PUBLIC,
    PUBLIC2,
    PUBLIC6,
    PUBLIC6B,
    RESOLVER,
    UPLINK_ADDRESS,
    UPLINK_ADDRESS6,
    Guest,
    Internet,
)

pytestmark = pytest.mark.root


class World:
    """Two slots on one uplink, a guest on the first."""

    def __init__(self, internet: Internet, tag: str) -> None:
        self.internet = internet
        executor = ThreadPoolExecutor(1)
        side = UplinkSide.open(Uplink.parse(f"netns:{internet.uplink}"), tag, Nft())
        self.fabric = Fabric(tag, side, Nft(), executor)
        self.slot, self.other = (create_slot(self.fabric, index) for index in (0, 1))
        self.guest = Guest(self.slot)

    def apply(self, policy: Policy) -> None:
        asyncio.run(self.slot.apply(policy))

    def close(self) -> None:
        self.guest.close()
        for slot in (self.slot, self.other):
            slot.close_handle()
            delete_slot(self.fabric, slot.index)
        assert self.fabric.uplink is not None
        self.fabric.uplink.close(remove_table=True)
        self.fabric.executor.shutdown()


@pytest.fixture
def world(internet: Internet, tag: str) -> Iterator[World]:
    made = World(internet, tag)
    yield made
    made.close()


@pytest.fixture
def guest(world: World) -> Guest:
    return world.guest


def test_public_addresses_are_reached(guest: Guest) -> None:
    assert guest.reaches(PUBLIC)
    assert guest.reaches(PUBLIC6)


def test_outside_sees_the_uplink_only(world: World) -> None:
    for address, seen in ((PUBLIC, UPLINK_ADDRESS), (PUBLIC6, UPLINK_ADDRESS6)):
        with world.guest.connect(address) as connection:
            assert connection.recv(100).decode().strip() == seen


@pytest.mark.parametrize("address", [*FORBIDDEN, *FORBIDDEN6])
def test_special_ranges_are_refused(world: World, address: str) -> None:
    assert not world.guest.reaches(address)
    world.apply(Policy(allow=("0.0.0.0/0", "::/0", address)))  # built-in denials beat the user's
    assert not world.guest.reaches(address)
    assert world.guest.reaches(PUBLIC)


def test_host_is_not_reached(world: World) -> None:
    assert world.fabric.uplink is not None
    transit = world.fabric.uplink.transit(0)
    with namespace.entered(world.slot._open_handle()):
        here = socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True)
    with namespace.entered(world.internet.uplink_handle):
        uplink = socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True)
    with here, uplink:
        for address in (HOST_ADDRESS, HOST_ADDRESS6, transit.near, transit.far, transit.near6, transit.far6):
            assert not world.guest.reaches(address), address
        world.apply(Policy(allow=("0.0.0.0/0", "::/0")))
        for server in (here, uplink):
            server.setblocking(False)
        for address in (UPLINK_ADDRESS, UPLINK_ADDRESS6):  # public, so only the uplink's own table stops it: silently
            with world.guest.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as made:
                made.setblocking(False)
                made.connect_ex((address, PORT))
                assert world.guest.reaches(PUBLIC)
                assert world.guest.reaches(PUBLIC6)
                for server in (here, uplink):
                    with pytest.raises(BlockingIOError):
                        server.accept()


def test_other_slots_are_not_reached(world: World) -> None:
    second = Guest(world.other)
    try:
        with namespace.entered(second.handle):
            server = socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True)
        with server:
            server.setblocking(False)
            assert world.fabric.uplink is not None
            transit = world.fabric.uplink.transit(world.other.index)
            world.apply(Policy(allow=("0.0.0.0/0", "::/0")))
            for address in (transit.near, transit.near6):
                assert not world.guest.reaches(address)
            assert second.reaches(PUBLIC)
            with pytest.raises(BlockingIOError):
                server.accept()
    finally:
        second.close()


def test_uplink_keeps_slots_apart_by_itself(world: World) -> None:
    """Also if the rules inside the slots were gone."""
    for slot in (world.slot, world.other):
        with namespace.entered(slot._open_handle()):
            Nft().run("flush chain inet aenv egress\nadd rule inet aenv egress accept\nflush chain inet aenv input\n"
                      "add rule inet aenv input accept\nadd rule inet aenv output accept")  # fmt: skip
    with namespace.entered(world.other._open_handle()):
        server = socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True)
    assert world.fabric.uplink is not None
    transit = world.fabric.uplink.transit(world.other.index)
    with server:
        server.setblocking(False)
        for address in (transit.near, transit.near6):
            with world.guest.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as made:
                made.setblocking(False)
                made.connect_ex((address, PORT))
                assert world.guest.reaches(PUBLIC)
                assert world.guest.reaches(PUBLIC6)
                with pytest.raises(BlockingIOError):
                    server.accept()


def test_uplink_namespace_cannot_open_connections_to_a_guest(world: World) -> None:
    with namespace.entered(world.guest.handle):
        server = socket.create_server(("0.0.0.0", PORT))
    with server:
        server.setblocking(False)
        assert world.fabric.uplink is not None
        near = world.fabric.uplink.transit(0).near
        with namespace.entered(world.internet.uplink_handle):
            attempt = socket.socket()
            os.system(f"ip route add {GUEST_ADDRESS} via {near}")
        with attempt:
            attempt.setblocking(False)
            attempt.connect_ex((GUEST_ADDRESS, PORT))
            assert world.guest.reaches(PUBLIC)
            with pytest.raises(BlockingIOError):
                server.accept()


def test_host_reaches_the_guest_and_gets_answers(world: World) -> None:
    with namespace.entered(world.guest.handle):
        server = socket.create_server((GUEST_ADDRESS, 49983))
        server6 = socket.create_server((GUEST_ADDRESS6, 49983), family=socket.AF_INET6)

    async def talk() -> tuple[str, bytes]:
        loop = asyncio.get_running_loop()
        connection = await world.slot.connect(49983, 20)
        with connection, server.accept()[0] as accepted:
            await loop.sock_sendall(connection, b"ping")
            assert accepted.recv(4) == b"ping"
            accepted.sendall(b"pong" * 10000)
            received = b""
            while len(received) < 40000:
                received += await loop.sock_recv(connection, 65536)
            return accepted.getpeername()[0], received

    with server, server6:
        world.apply(Policy(internet=False))  # must not matter
        peer, received = uvloop.run(talk())  # the daemon's own kind of loop
        assert peer == HOST_ADDRESS
        assert received == b"pong" * 10000
        with world.slot.socket(socket.AF_INET6) as made:
            made.settimeout(20)
            made.connect((GUEST_ADDRESS6, 49983))


def test_connect_to_a_closed_port_is_refused(world: World) -> None:
    with pytest.raises(ConnectionRefusedError):
        uvloop.run(world.slot.connect(1, 20))


def test_connect_without_a_guest_times_out(world: World) -> None:
    with pytest.raises(TimeoutError):
        uvloop.run(world.other.connect(1, 0.05))


def test_internet_off(world: World) -> None:
    world.apply(Policy(internet=False))
    for address in (PUBLIC, PUBLIC6, RESOLVER):
        assert not world.guest.reaches(address)
    assert not world.guest.reaches(RESOLVER, 53)


def test_allow_beats_deny(world: World) -> None:
    world.apply(Policy(allow=(PUBLIC, "2001:db8::/64"), deny=("198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")))
    assert [world.guest.reaches(a) for a in (PUBLIC, PUBLIC2, PUBLIC6, PUBLIC6B)] == [True, False, True, False]


def test_allow_with_internet_off(world: World) -> None:
    world.apply(Policy(allow=(PUBLIC,), internet=False))
    assert [world.guest.reaches(a) for a in (PUBLIC, PUBLIC2, PUBLIC6)] == [True, False, False]


def test_deny_all_covers_both_families(world: World) -> None:
    world.apply(Policy(deny=("0.0.0.0/0",), allow=(PUBLIC2,)))
    assert [world.guest.reaches(a) for a in (PUBLIC, PUBLIC2, PUBLIC6)] == [False, True, False]


def test_allow_alone_denies_nothing(world: World) -> None:
    world.apply(Policy(allow=(PUBLIC,)))
    assert world.guest.reaches(PUBLIC2)


def test_dns_goes_to_resolvers_only(world: World) -> None:
    guest, internet = world.guest, world.internet
    assert guest.reaches(RESOLVER, 53)
    assert not guest.reaches("9.9.9.9", 53)
    assert guest.reaches("9.9.9.9", PORT)
    guest.send("9.9.9.9", b"wrong", 53)
    guest.send(RESOLVER, b"right", 53)
    internet.wait_datagram(b"right")
    assert b"wrong" not in internet.datagrams
    world.apply(Policy(dns=("9.9.9.9",), allow=("0.0.0.0/0",)))
    assert guest.reaches("9.9.9.9", 53)
    assert not guest.reaches(RESOLVER, 53)
    world.apply(Policy(dns=("9.9.9.9",), deny=("9.9.9.0/24",)))
    assert not guest.reaches("9.9.9.9", 53)


def _exchange(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    assert connection.recv(100) == data


@pytest.mark.parametrize("address", [PUBLIC, PUBLIC6])
def test_denial_ends_established_flows(world: World, address: str) -> None:
    with world.guest.connect(address) as connection:
        connection.recv(100)
        _exchange(connection, b"one")
        world.apply(Policy(deny=("198.51.100.0/24", "2001:db8::/64")))
        with pytest.raises(ConnectionResetError):
            _exchange(connection, b"two")


def test_allowed_flows_survive_a_change(world: World) -> None:
    with world.guest.connect(PUBLIC) as connection:
        connection.recv(100)
        for policy in (Policy(deny=(PUBLIC2,)), Policy(internet=False, allow=(PUBLIC,)), Policy()):
            world.apply(policy)
            _exchange(connection, b"still")


def test_denied_server_cannot_go_on_sending(world: World) -> None:
    """Also a flow in which only the other side speaks ends."""
    with world.guest.socket(socket.AF_INET, socket.SOCK_DGRAM) as made, namespace.entered(world.internet.handle):
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with server:
        server.bind((PUBLIC, 9000))
        server.settimeout(20)
        with world.guest.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            made.sendto(b"hello", (PUBLIC, 9000))
            _, peer = server.recvfrom(100)
            server.sendto(b"before", peer)
            assert made.recv(100) == b"before"
            world.apply(Policy(deny=(PUBLIC,)))
            server.sendto(b"during", peer)
            world.apply(Policy())
            server.sendto(b"after", peer)
            assert made.recv(100) == b"after"


def test_invalid_policy_changes_nothing(world: World) -> None:
    world.apply(Policy(deny=(PUBLIC,)))
    with pytest.raises(InvalidInputError, match=r"allow\[0\]"):
        world.apply(Policy(allow=("nonsense",)))
    assert not world.guest.reaches(PUBLIC)
    assert world.guest.reaches(PUBLIC2)


def test_thousands_of_overlapping_networks(world: World) -> None:
    many = tuple(f"23.{i >> 8}.{i & 255}.0/{24 - i % 3}" for i in range(4000))
    world.apply(Policy(deny=(*many, "198.51.0.0/16", PUBLIC, PUBLIC), allow=(*many, "203.0.113.0/24")))
    assert not world.guest.reaches(PUBLIC)
    assert world.guest.reaches(PUBLIC2)


@pytest.mark.parametrize("more", [0, 2 * INLINE_ENTRIES])
def test_change_is_atomic(world: World, more: int) -> None:
    """An address that is denied before, during and after many changes is never let through: as a rule and in a set."""
    others = tuple(f"24.{i}.0.0/17" for i in range(more))
    guest, internet = world.guest, world.internet
    policies = [Policy(deny=(PUBLIC, f"23.0.{i}.0/24", *others), internet=i % 2 == 0) for i in range(30)]
    world.apply(policies[-1])
    with guest.socket(socket.AF_INET, socket.SOCK_DGRAM) as made, ThreadPoolExecutor(1) as executor:
        made.setblocking(False)
        changing = executor.submit(lambda: [world.apply(p) for p in policies])
        while not changing.done():
            try:
                made.sendto(b"leak", (PUBLIC, PORT))
            except OSError:  # the refusal of an earlier one
                continue
        changing.result()
    world.apply(Policy(deny=(PUBLIC,)))
    guest.send(PUBLIC2, b"end")  # behind all that waits in the guest's queue
    internet.wait_datagram(b"end")
    assert b"leak" not in internet.datagrams


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _udp4(source: str, payload: bytes, *, ethernet_source: str = GUEST_MAC, destination: str = PUBLIC) -> bytes:
    udp = struct.pack("!HHHH", 5000, PORT, 8 + len(payload), 0) + payload
    head = struct.pack(
        "!BBHHHBBH4s4s",
        0x45,
        0,
        20 + len(udp),
        1,
        0,
        64,
        17,
        0,
        socket.inet_aton(source),
        socket.inet_aton(destination),
    )
    head = head[:10] + struct.pack("!H", _checksum(head)) + head[12:]
    return _mac(TAP_MAC) + _mac(ethernet_source) + b"\x08\x00" + head + udp


def _udp6(source: str, payload: bytes) -> bytes:
    ends = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, PUBLIC6)
    length = 8 + len(payload)
    pseudo = ends + struct.pack("!II", length, 17)
    body = payload + bytes(length % 2)
    checksum = _checksum(pseudo + struct.pack("!HHHH", 5000, PORT, length, 0) + body)
    udp = struct.pack("!HHHH", 5000, PORT, length, checksum) + payload
    return _mac(TAP_MAC) + _mac(GUEST_MAC) + b"\x86\xdd" + struct.pack("!IHBB", 6 << 28, length, 17, 64) + ends + udp


@pytest.mark.parametrize(
    "frame",
    [
        _udp4("169.254.0.20", b"spoof"),
        _udp4(HOST_ADDRESS, b"spoof"),
        _udp4("8.8.8.8", b"spoof"),
        _udp4("127.0.0.1", b"spoof"),
        _udp4("0.0.0.0", b"spoof"),
        _udp4(GUEST_ADDRESS, b"spoof", ethernet_source="02:ae:00:00:00:23"),
        _udp4(GUEST_ADDRESS, b"spoof", ethernet_source=TAP_MAC),
        _udp6("fd00:ae::23", b"spoof"),
        _udp6(HOST_ADDRESS6, b"spoof"),
        _udp6("fe80::1", b"spoof"),
        _udp6("::", b"spoof"),
        _udp6("2001:db8::99", b"spoof"),
        # a VLAN frame with the guest's own address
        _udp4(GUEST_ADDRESS, b"spoof")[:12] + b"\x81\x00\x00\x01" + _udp4(GUEST_ADDRESS, b"spoof")[12:],
    ],
)
def test_spoofed_source_is_dropped(world: World, frame: bytes) -> None:
    world.guest.inject(frame)
    world.guest.inject(_udp4(GUEST_ADDRESS, b"honest"))
    world.internet.wait_datagram(b"honest")
    world.guest.inject(_udp6(GUEST_ADDRESS6, b"honest6"))
    world.internet.wait_datagram(b"honest6")
    assert b"spoof" not in world.internet.datagrams


@pytest.mark.parametrize("junk", [b"", b"\x00", bytes(13), bytes(14), b"\xff" * 60, _udp4(GUEST_ADDRESS, b"x")[:30],
                                  _mac(TAP_MAC) + _mac(GUEST_MAC) + b"\x86\xdd" + b"\x60" + b"\xff" * 200])  # fmt: skip
def test_junk_frames_do_no_harm(world: World, junk: bytes) -> None:
    try:
        world.guest.inject(junk)
    except OSError:
        assert len(junk) < 14  # the kernel's own check
    assert world.guest.reaches(PUBLIC)


def _neighbours(slot: Slot) -> list[str]:
    with os.popen(f"ip -n {slot.name} neigh show dev tap0") as output:
        return sorted(line.split()[0] + " " + line.split()[-1] for line in output)


def test_guest_cannot_fill_or_change_the_neighbour_table(world: World) -> None:
    """The kernel's neighbour table is one for all namespaces: one guest must not be able to use it up."""
    before = _neighbours(world.slot)
    assert set(before) == {f"{GUEST_ADDRESS} PERMANENT", f"{GUEST_ADDRESS6} PERMANENT"}
    guest_mac, other_mac = _mac(GUEST_MAC), _mac("02:ae:00:00:00:77")
    for sender, ethernet in (("169.254.0.20", guest_mac), ("10.0.0.1", guest_mac), (GUEST_ADDRESS, other_mac)):
        arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + ethernet + socket.inet_aton(sender) + bytes(6)
        arp += socket.inet_aton(HOST_ADDRESS)
        world.guest.inject(b"\xff" * 6 + guest_mac + b"\x08\x06" + arp)
    assert world.guest.reaches(PUBLIC)
    assert _neighbours(world.slot) == before


def test_guest_resolves_the_gateway(world: World) -> None:
    """ARP and neighbour discovery must work: a guest that boots knows no MAC."""
    os.system(f"ip -n {world.guest.name} neigh flush all")
    assert world.guest.reaches(PUBLIC)
    assert world.guest.reaches(PUBLIC6)


def test_one_guest_cannot_fill_the_uplinks_connection_table(world: World) -> None:
    for port in range(1024, 1024 + MAX_CONNECTIONS + 500):
        world.guest.inject(_udp4(GUEST_ADDRESS, b"flood").replace(struct.pack("!H", 5000), struct.pack("!H", port), 1))
    with os.popen(f"ip netns exec {world.internet.uplink} sysctl -n net.netfilter.nf_conntrack_count") as output:
        assert int(output.read()) <= MAX_CONNECTIONS + 10


def test_adopted_slot_keeps_its_policy_and_takes_new_ones(world: World) -> None:
    for policies in range(1, 4):  # both generations of sets
        world.apply(Policy(deny=(PUBLIC,), allow=tuple(f"23.{i}.0.0/17" for i in range(20 * policies))))
        adopted = adopt_slot(world.fabric, world.slot.index)
        try:
            assert not world.guest.reaches(PUBLIC)
            asyncio.run(adopted.apply(Policy(deny=(PUBLIC2,))))
            assert world.guest.reaches(PUBLIC)
            assert not world.guest.reaches(PUBLIC2)
        finally:
            world.slot._generation = adopted._generation
            adopted.close_handle()
