from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from aenv.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from aenv.network import namespace, pool
from aenv.network.base import Policy, Uplink
from aenv.network.check import check, describe
from aenv.network.nft import Nft
from aenv.network.pool import SlotPool
from aenv.network.slot import Slot
from aenv.network.uplink import MAX_SLOTS, UplinkSide, device_name, max_index, read_sysctl
from tests.leftovers import CLAIMS
from tests.network.conftest import FORBIDDEN, PORT, PUBLIC, PUBLIC6, Guest, Internet

pytestmark = pytest.mark.root
NONE = Uplink.parse("none")
ROOT = Path(__file__).parents[2]


def run(made: SlotPool, body: Callable[[SlotPool], Awaitable[None]], *, keep: set[int] | None = None) -> None:
    """Start the pool, run `body`, close the pool."""

    async def main() -> None:
        await made.start(keep or set())
        try:
            await body(made)
        finally:
            await made.close()

    asyncio.run(main())


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def test_life(tag: str) -> None:
    async def body(made: SlotPool) -> None:
        await made.settled()
        assert made.ready() == 2
        taken = [await made.take() for _ in range(3)]
        assert len({s.index for s in taken}) == 3
        assert all(s.name == namespace.namespace_name(tag, s.index) for s in taken)
        await made.settled()
        assert made.ready() == 2
        os.close(taken[0].tap_fd())
        await made.release(taken[0])
        await made.release(taken[0])
        await made.settled()
        assert taken[0].index not in namespace.list_indices(tag)
        assert len(namespace.list_indices(tag)) == 4

    run(SlotPool(uplink=NONE, size=2, tag=tag), body)


def test_released_slot_is_unusable(tag: str) -> None:
    async def body(made: SlotPool) -> None:
        taken = await made.take()
        await made.release(taken)
        for action in (taken.tap_fd, taken.socket):
            with pytest.raises(NotFoundError):
                action()
        with pytest.raises(NotFoundError):
            await taken.apply(Policy())
        with pytest.raises(NotFoundError):
            await taken.connect(1, 1)

    run(SlotPool(uplink=NONE, size=0, tag=tag), body)


def test_takers_at_once_get_different_slots(tag: str) -> None:
    async def body(made: SlotPool) -> None:
        taken = await asyncio.gather(*(made.take() for _ in range(12)))
        assert len({s.index for s in taken}) == 12

    run(SlotPool(uplink=NONE, size=1, tag=tag), body)


def test_limit(tag: str) -> None:
    async def body(made: SlotPool) -> None:
        results = await asyncio.gather(*(made.take() for _ in range(5)), return_exceptions=True)
        slots = [r for r in results if isinstance(r, Slot)]
        assert len(slots) == 3
        assert all(isinstance(r, UnavailableError) for r in results if not isinstance(r, Slot))
        await made.release(slots[0])
        again = await made.take()  # waits for the removal, not refused
        assert again.index not in {s.index for s in slots[1:]}
        with pytest.raises(UnavailableError, match="3 network slots"):
            await made.take()

    run(SlotPool(uplink=NONE, size=2, tag=tag, limit=3), body)


def test_cancelled_taker_loses_nothing(tag: str) -> None:
    async def body(made: SlotPool) -> None:
        task = asyncio.create_task(made.take())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await made.settled()
        taken = [await made.take(), await made.take()]
        assert {s.index for s in taken} == {0, 1}

    run(SlotPool(uplink=NONE, size=0, tag=tag, limit=2), body)


def test_tap_has_one_owner(tag: str) -> None:
    async def body(made: SlotPool) -> None:
        taken = await made.take()
        first = taken.tap_fd()
        with pytest.raises(ConflictError):
            taken.tap_fd()
        os.close(first)
        os.close(taken.tap_fd())

    run(SlotPool(uplink=NONE, size=0, tag=tag), body)


def test_making_stays_off_the_event_loop(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()
    for name in ("create_slot", "delete_slot", "adopt_slot"):
        real = getattr(pool, name)

        def noted(*arguments: object, real: Callable[..., object] = real) -> object:
            threads.add(threading.current_thread())
            return real(*arguments)

        monkeypatch.setattr(pool, name, noted)

    async def body(made: SlotPool) -> None:
        await made.release(await made.take())
        await made.settled()

    run(SlotPool(uplink=NONE, size=2, tag=tag), body)
    assert threads
    assert threading.main_thread() not in threads


def test_uplink_none_has_no_way_out(tag: str) -> None:
    async def body(made: SlotPool) -> None:
        taken = await made.take()
        guest = Guest(taken)
        try:
            await taken.apply(Policy(allow=("0.0.0.0/0", "::/0")))
            for address in (PUBLIC, PUBLIC6, FORBIDDEN[0]):
                assert not guest.reaches(address)
        finally:
            guest.close()
        assert {line.split()[0] for line in _ip("-n", taken.name, "-br", "link").splitlines()} & {"up0"} == set()

    run(SlotPool(uplink=NONE, size=0, tag=tag), body)


def _refusals(guest: Guest, address: str, count: int) -> int:
    """How many of `count` datagrams are refused by an ICMP error. One that is not raises TimeoutError. (The kernel
    has another limit, for all namespaces: a burst of 50.)"""
    v6 = ":" in address
    level, option = (socket.IPPROTO_IPV6, 25) if v6 else (socket.IPPROTO_IP, 11)  # IP_RECVERR, IPV6_RECVERR
    refused = 0
    with guest.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(level, option, 1)
        sock.connect((address, 53))
        for _ in range(count):
            sock.send(b"?")
            try:
                sock.recv(1)
            except TimeoutError:
                raise
            except OSError:
                refused += 1
    return refused


@pytest.mark.parametrize("adopted", [False, True], ids=["made", "adopted"])
def test_every_packet_without_a_way_out_is_refused(internet: Internet, tag: str, adopted: bool) -> None:
    """Not only the first few of a second: a resolver sends eight for one name and waits 5 s for each answer."""
    index = _killed_daemon(f"netns:{internet.uplink}", tag) if adopted else None

    async def body(made: SlotPool) -> None:
        guest = Guest(await (made.take() if index is None else made.adopt(index)))
        try:
            for address in (PUBLIC, PUBLIC6):
                assert (address, _refusals(guest, address, 15)) == (address, 15)
        finally:
            guest.close()

    run(SlotPool(uplink=NONE, size=0, tag=tag), body, keep=set() if index is None else {index})
    if adopted:
        _clear(internet, tag)


@pytest.mark.parametrize("address", [PUBLIC, PUBLIC6])
def test_every_packet_that_the_policy_denies_is_refused(internet: Internet, tag: str, address: str) -> None:
    async def body(made: SlotPool) -> None:
        taken = await made.take()
        guest = Guest(taken)
        try:
            await taken.apply(Policy(deny=("0.0.0.0/0", "::/0")))
            assert (address, _refusals(guest, address, 15)) == (address, 15)
        finally:
            guest.close()

    run(SlotPool(uplink=Uplink.parse(f"netns:{internet.uplink}"), size=0, tag=tag), body)


def test_uplink_none_changes_nothing_outside(tag: str) -> None:
    """With a thread whose own network is a fresh namespace, so other programs do not disturb the comparison."""

    def look() -> tuple[str, ...]:
        names = ("ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv4/conf/all/rp_filter")
        return (Nft().run("list ruleset"), _ip("address"), *map(read_sysctl, names))

    with namespace.fresh():
        before = look()
        assert UplinkSide.open(NONE, tag, Nft()) is None
        assert look() == before


def test_uplink_host_changes_what_is_documented(tag: str) -> None:
    with namespace.fresh():
        side = UplinkSide.open(Uplink.parse("host"), tag, Nft())
        assert side is not None
        assert read_sysctl("ipv4/ip_forward") == "1"
        assert read_sysctl("ipv6/conf/all/forwarding") == "0"  # never turned on for a host
        assert not side.ipv6
        assert Nft().run("list tables").split() == ["table", "inet", f"aenv_{tag}"]
        side.close(remove_table=True)
        assert Nft().run("list ruleset") == ""


def test_unknown_uplink_namespace(tag: str) -> None:
    with pytest.raises(InvalidInputError, match=r"uplink.*no network namespace"):
        asyncio.run(SlotPool(uplink=Uplink.parse("netns:test-no-such"), size=1, tag=tag).start())


@pytest.mark.parametrize("transit", ["nonsense", "10.0.0.1/8", "10.0.0.0/17", "fd00::/12"])
def test_bad_transit_range(tag: str, transit: str) -> None:
    with pytest.raises(InvalidInputError, match=r"network\.transit"):
        UplinkSide.open(NONE, tag, Nft(), transit)


def test_two_daemons_share_an_uplink(internet: Internet, tag: str) -> None:
    """Also when their tags hash to the same block, and while the first has no slot yet."""
    other = CLAIMS.mark(f"{(int(tag, 16) + 16) % (1 << 24):06x}")
    uplink = Uplink.parse(f"netns:{internet.uplink}")

    async def main() -> None:
        first, second = (SlotPool(uplink=uplink, size=0, tag=t) for t in (tag, other))
        await first.start()
        await second.start()
        guests = []
        try:
            slots = [await first.take(), await second.take()]
            guests = [Guest(s) for s in slots]
            for guest in guests:
                assert guest.reaches(PUBLIC)
                assert guest.reaches(PUBLIC6)
        finally:
            for guest in guests:
                guest.close()
            await second.close()
            await first.close()

    asyncio.run(main())


def test_same_home_twice_is_refused(internet: Internet, tag: str) -> None:
    uplink = Uplink.parse(f"netns:{internet.uplink}")

    async def body(made: SlotPool) -> None:
        taken = await made.take()
        with pytest.raises(UnavailableError, match="same home"):
            await SlotPool(uplink=uplink, size=0, tag=tag).start()
        assert taken.index in namespace.list_indices(tag)

    run(SlotPool(uplink=uplink, size=0, tag=tag), body)


def test_release_cuts_off_a_vmm_that_still_runs(internet: Internet, tag: str) -> None:
    async def body(made: SlotPool) -> None:
        taken = await made.take()
        guest = Guest(taken)
        try:
            assert guest.reaches(PUBLIC)
            await made.release(taken)
            await made.settled()
            assert taken.index not in namespace.list_indices(tag)
            assert f"ae{tag}-" not in _ip("-n", internet.uplink, "link")
            with pytest.raises(OSError):  # the device behind the descriptor is gone
                os.write(guest._tap, bytes(100))
        finally:
            guest.close()

    run(SlotPool(uplink=Uplink.parse(f"netns:{internet.uplink}"), size=0, tag=tag), body)


STEPS = (
    "slot._create_tap", "slot.write_sysctl", "slot._configure_tap", "slot._create_veth", "slot._configure_veth",
    "uplink.UplinkSide.attach", "nft.Nft.run",
)  # fmt: skip


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), UnavailableError("no"), RuntimeError("bug")])
@pytest.mark.parametrize("step", STEPS)
def test_failed_creation_leaves_nothing(
    internet: Internet, tag: str, step: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    async def body(made: SlotPool) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(f"aenv.network.{step}", fail)
            with pytest.raises((UnavailableError, RuntimeError)):
                await made.take()
        assert namespace.list_indices(tag) == []
        assert f"ae{tag}-" not in _ip("-n", internet.uplink, "link")
        taken = await made.take()  # the pool still works, with the same index
        assert taken.index == 0

    run(SlotPool(uplink=Uplink.parse(f"netns:{internet.uplink}"), size=0, tag=tag), body)


KILLED = """
import asyncio, sys
from aenv.network.base import Policy, Uplink
from aenv.network.pool import SlotPool
async def main():
    pool = SlotPool(uplink=Uplink.parse(sys.argv[1]), size=2, tag=sys.argv[2])
    await pool.start()
    slot = await pool.take()
    await slot.apply(Policy(deny=(sys.argv[3],)))
    await pool.settled()
    print(slot.index, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def _killed_daemon(uplink: str, tag: str) -> int:
    """Run a daemon's pool in a process, kill -9 it; the index of the slot it had in use."""
    command = [sys.executable, "-c", KILLED, uplink, tag, PUBLIC]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        index = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    assert len(namespace.list_indices(tag)) == 3
    return index


@pytest.mark.parametrize("kind", ["none", "netns"])
def test_leftovers_of_a_killed_daemon_go(internet: Internet, tag: str, kind: str) -> None:
    uplink = f"netns:{internet.uplink}" if kind == "netns" else kind
    _killed_daemon(uplink, tag)

    async def body(made: SlotPool) -> None:
        assert namespace.list_indices(tag) == []
        assert f"ae{tag}-" not in _ip("-n", internet.uplink, "link")

    run(SlotPool(uplink=Uplink.parse(uplink), size=0, tag=tag), body)


def test_slot_of_a_killed_daemon_is_adopted(internet: Internet, tag: str) -> None:
    uplink = f"netns:{internet.uplink}"
    index = _killed_daemon(uplink, tag)

    async def body(made: SlotPool) -> None:
        assert namespace.list_indices(tag) == [index]
        adopted = await made.adopt(index)
        with pytest.raises(ConflictError):
            await made.adopt(index)
        others = [await made.take(), await made.take()]
        assert index not in {s.index for s in others}
        guest = Guest(adopted)
        try:
            assert not guest.reaches(PUBLIC)  # the policy of the former daemon holds
            assert guest.reaches(PUBLIC6)
            await adopted.apply(Policy())
            assert guest.reaches(PUBLIC)
        finally:
            guest.close()
        await made.release(adopted)

    run(SlotPool(uplink=Uplink.parse(uplink), size=1, tag=tag), body, keep={index})


def _clear(internet: Internet, tag: str) -> None:
    """The daemon of an old uplink is gone: its table is cleared by hand."""
    with namespace.entered(internet.uplink_handle):
        Nft().run(f"delete table inet aenv_{tag}")


def test_adopting_under_uplink_none_cuts_the_way_out(internet: Internet, tag: str) -> None:
    index = _killed_daemon(f"netns:{internet.uplink}", tag)

    async def body(made: SlotPool) -> None:
        guest = Guest(await made.adopt(index))
        try:
            assert not guest.reaches(PUBLIC6)
        finally:
            guest.close()

    run(SlotPool(uplink=NONE, size=0, tag=tag), body, keep={index})
    _clear(internet, tag)


@pytest.mark.parametrize("damage", ["missing", "file", "no tap"])
def test_damaged_slot_is_not_adopted(tag: str, damage: str) -> None:
    name = namespace.namespace_name(tag, 7)
    namespace.NETNS_DIRECTORY.mkdir(exist_ok=True)
    if damage == "file":
        (namespace.NETNS_DIRECTORY / name).touch()
    elif damage == "no tap":
        namespace.create(name)

    async def body(made: SlotPool) -> None:
        with pytest.raises(NotFoundError):
            await made.adopt(7)
        with pytest.raises(ConflictError):
            await made.adopt(8)
        await made.settled()
        assert namespace.list_indices(tag) == []

    run(SlotPool(uplink=NONE, size=0, tag=tag), body, keep={7})


def test_close_keeps_what_it_is_told(internet: Internet, tag: str) -> None:
    uplink = Uplink.parse(f"netns:{internet.uplink}")

    async def main() -> None:
        first = SlotPool(uplink=uplink, size=1, tag=tag)
        await first.start()
        kept, gone = await first.take(), await first.take()
        guest = Guest(kept)
        try:
            await first.close({kept.index})
            await first.close()
            assert namespace.list_indices(tag) == [kept.index]
            assert guest.reaches(PUBLIC)  # a VM goes on while no daemon runs
            with pytest.raises(UnavailableError):
                await first.take()
            second = SlotPool(uplink=uplink, size=0, tag=tag)
            await second.start({kept.index})
            adopted = await second.adopt(kept.index)
            assert guest.reaches(PUBLIC)
            await second.release(adopted)
            await second.close()
        finally:
            guest.close()
        assert gone.index != kept.index

    asyncio.run(main())


def test_close_while_making(tag: str) -> None:
    async def main() -> None:
        made = SlotPool(uplink=NONE, size=6, tag=tag)
        await made.start()
        waiting = [asyncio.create_task(made.take()) for _ in range(3)]
        await asyncio.sleep(0)
        await made.close()
        assert all(isinstance(r, UnavailableError) for r in await asyncio.gather(*waiting, return_exceptions=True))

    asyncio.run(main())


def test_published_port_of_the_uplink_is_not_reached(internet: Internet, tag: str) -> None:
    """DNAT in the uplink (a container's published port) must not carry a guest into a private network."""
    with namespace.entered(internet.uplink_handle):
        Nft().run(
            "table ip published { chain c { type nat hook prerouting priority dstnat;\n"
            f'ip daddr 203.0.113.1 tcp dport {PORT} dnat to {FORBIDDEN[0]}\n'
            f'iifname "out" tcp dport 1 accept\n}}\n}}\n'
        )  # fmt: skip

    async def body(made: SlotPool) -> None:
        guest = Guest(await made.take())
        try:
            with guest.socket(socket.AF_INET, socket.SOCK_STREAM) as attempt:
                attempt.setblocking(False)
                attempt.connect_ex(("203.0.113.1", PORT))
                assert guest.reaches(PUBLIC)
                with pytest.raises(BlockingIOError):
                    attempt.recv(1)
        finally:
            guest.close()

    run(SlotPool(uplink=Uplink.parse(f"netns:{internet.uplink}"), size=0, tag=tag), body)


def test_doctor_finds_all_this_machine_has() -> None:
    before = os.readlink(namespace.CURRENT)
    findings = check(NONE)
    assert [f for f in findings if not f.ok] == []
    assert {"tap devices", "libnftables", "network namespaces", "firewall"} <= {f.name for f in findings}
    assert os.readlink(namespace.CURRENT) == before


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aenv.network.nft.LIBRARY", "libno-such.so.1")
    monkeypatch.setattr("aenv.network.check._TUN", Path("/dev/no-such"))
    missing = {f.name: f for f in check(Uplink.parse("netns:test-no-such")) if not f.ok}
    assert set(missing) == {"tap devices", "libnftables", "uplink"}
    assert all(f.hint for f in missing.values())


def test_doctor_names_the_kernel_part(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Nft.run

    def without_masquerade(self: Nft, script: str) -> str:
        if "masquerade" in script:
            raise UnavailableError("nft: Could not process rule: No such file or directory")
        return real(self, script)

    monkeypatch.setattr(Nft, "run", without_masquerade)
    assert [f.hint for f in check(NONE) if not f.ok] == ["a kernel with CONFIG_NFT_MASQ"]


def test_descriptions_differ() -> None:
    assert len({describe(Uplink.parse(u)) for u in ("host", "none", "netns:a", "netns:b")}) == 4


@pytest.mark.parametrize("bad", ["", "abc", "xyzxyz", "ABCDEF", "123456789", "../../x", "abcdef\n"])
def test_bad_tag(bad: str) -> None:
    with pytest.raises(ValueError, match="hex digits"):
        SlotPool(uplink=NONE, size=0, tag=bad)


@pytest.mark.parametrize("good", ["abcd", "abcdef", "01234567"])
def test_device_names_fit(good: str) -> None:
    assert len(device_name(good, min(MAX_SLOTS - 1, max_index(good)))) <= 15
