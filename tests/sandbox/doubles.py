"""Stand-ins for what `Machines` is made of: VMM, network slots, block server. All above them is real.

A `Host` outlives the daemons that a test starts on it, as the machines and the block server of a real one do. Guests
have a content, in memory and on disk, and layers hold what has changed of it, as JSON objects in files. Device state
says which content it belongs to: a machine that is given other memory or another disk than it had is a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock
from weakref import WeakValueDictionary

from aenv.errors import AenvError, NotFoundError, VmmError
from aenv.network.base import Policy
from aenv.network.pool import SlotPool
from aenv.snapshot.capture import Captured, CaptureStats
from aenv.storage.blocks import Blocks
from aenv.vmm.base import Disk, Exit, Machine, MemoryMap, MemoryRegion, Nic, Vmm, VmmKind, VmState
from aenv.vmm.qemu import TCG_CPU
from tests.sandbox.layers import Content, FakeBlocks, FakeImage, content_of, merged

METRICS = {
    "ts": 1, "cpu_count": 1, "cpu_used_pct": 1.5, "mem_total": 100, "mem_used": 50, "disk_used": 5, "disk_total": 10,
}  # fmt: skip
GuestHandler = Callable[["FakeSlot", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
FIRST_PID = 5_000_000  # above what Linux gives to processes: no real one is ever meant
PIDS = itertools.count(FIRST_PID)
VMS: WeakValueDictionary[int, FakeVm] = WeakValueDictionary()


class Host:
    """The machines of one host. `fail` maps a step to the error it raises, `hold` to what it waits for.

    `fail_at` and `stop_at` count steps down: at zero one step fails (with `error`), or all wait for ever from there on.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.alive: dict[int, tuple[FakeVm, FakeSlot]] = {}  # by pid
        self.slots: dict[int, FakeSlot] = {}  # those in use, by index
        self.adopted: set[int] = set()  # indices of slots
        self.indices = itertools.count(1)
        self.count: Counter[str] = Counter()
        self.fail: dict[str, Exception] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}
        self.fail_at: int | None = None
        self.stop_at: int | None = None
        self.error: Exception = VmmError("no")
        self.stopped_at = ""  # the step at which all stopped
        self.guest: GuestHandler = healthy
        self.listens = True
        self.metrics: dict[str, Any] = dict(METRICS)
        self.servers: set[asyncio.Task[None]] = set()
        self.jitter: Callable[[], float] | None = None
        self.faults: list[str] = []
        root.mkdir(parents=True, exist_ok=True)
        self.blocks = FakeBlocks(self, root / "shown")

    async def step(self, name: str) -> None:
        """A point where a test can wait, delay or fail."""
        self.count[name] += 1
        self.reached.setdefault(name, asyncio.Event()).set()
        if self.stop_at is not None:
            self.stop_at -= 1
            if self.stop_at < 0:
                self.stopped_at = self.stopped_at or name
                await asyncio.Event().wait()
        if name in self.hold:
            await self.hold[name].wait()
        if self.jitter is not None:
            await asyncio.sleep(self.jitter())
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at, self.stopped_at = None, name
                raise self.error
        if name in self.fail:
            raise self.fail[name]

    async def until(self, name: str) -> None:
        """Wait until a step is reached (again: clear `reached` first)."""
        await asyncio.wait_for(self.reached.setdefault(name, asyncio.Event()).wait(), 10)

    def fault(self, what: str) -> VmmError:
        """Something that must never happen."""
        self.faults.append(what)
        return VmmError(what)

    async def close(self) -> None:
        for task in list(self.servers):
            task.cancel()
        await asyncio.gather(*self.servers, return_exceptions=True)


# Machines


class FakeVm:
    kind = VmmKind.QEMU_TCG

    def __init__(self, host: Host, run_dir: Path, state: VmState) -> None:
        self.host = host
        self.pid = next(PIDS)
        self.start_time = 1000 + self.pid
        self.run_dir = run_dir
        self.state = state
        self.memory: Content = {}
        self.private: set[str] = set()  # what was written since its memory was mapped
        self.files: set[Path] = set()
        self.disk: FakeImage | None = None
        self.console = b""
        self.on_io_error: Callable[[str], None] | None = None
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        run_dir.mkdir(parents=True)
        VMS[self.pid] = self

    @property
    def runs(self) -> bool:
        return self.state is VmState.RUNNING

    @property
    def dead(self) -> bool:
        return self.state is VmState.EXITED

    async def _do(self, step: str, *states: VmState) -> None:
        await self.host.step(step)
        if self.dead:
            raise VmmError("the machine is gone")
        if states and self.state not in states:
            raise self.host.fault(f"{step}: the machine is {self.state.value}")

    async def map_memory(self, map: MemoryMap) -> None:
        await self._do("map", VmState.PREPARED)
        self.memory = merged([content_of(path) for path in map.files])
        self.private.clear()
        self.files |= set(map.files)

    async def attach_disk(self, disk: Disk) -> None:
        await self._do("attach", VmState.PREPARED)
        self.attach(disk)

    def attach(self, disk: Disk) -> None:
        (self.disk,) = (image for image in self.host.blocks.images.values() if image.path == disk.path)
        for vm, _ in self.host.alive.values():
            if vm is not self and vm.disk is self.disk:
                raise self.host.fault("two machines write to one disk")

    async def load_state(self, state: Path) -> None:
        await self._do("load", VmState.PREPARED)
        if not state.exists():
            raise VmmError("there is no state to restore")
        assert self.disk is not None
        saved = json.loads(state.read_bytes())
        for what, present in (("memory", self.memory), ("disk", self.disk.read())):
            if saved.get(what, {}) != present:
                raise self.host.fault(f"restored with {what} {present} instead of {saved.get(what)}")
        self.state = VmState.PAUSED

    async def resume(self) -> None:
        await self._do("resume", VmState.PAUSED, VmState.RUNNING, VmState.IO_ERROR)
        self.state = VmState.RUNNING

    async def quiet(self, patience: float) -> bool:
        await self._do("quiet")
        return True

    async def pause(self) -> None:
        await self._do("vm.pause", VmState.PAUSED, VmState.RUNNING, VmState.IO_ERROR)
        self.state = VmState.PAUSED

    async def save_state(self, state: Path) -> None:
        assert self.disk is not None
        saved = {"memory": dict(self.memory), "disk": self.disk.read()}
        await self._do("save", VmState.PAUSED)
        with state.open("x") as file:
            json.dump(saved, file)

    async def memory_regions(self) -> list[MemoryRegion]:
        await self._do("regions")
        return [MemoryRegion(self.pid, 0, 0, 128 << 20)]

    async def serial_since(self, position: int) -> tuple[bytes, int]:
        return self.console[position:], len(self.console)

    async def serial_tail(self, limit: int = 4096) -> str:
        return "last words on the console"

    async def kill(self) -> None:
        await self.host.step("kill")
        self.end("killed")

    def end(self, reason: str) -> None:
        if self.host.alive.pop(self.pid, None) is not None:
            self.host.count["ended"] += 1
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.die(reason)

    def die(self, reason: str = "killed by signal 9") -> None:
        """The process ends by itself."""
        self.state = VmState.EXITED
        if not self.exited.done():
            self.exited.set_result(Exit(reason, "kernel panic"))

    # What its programs do

    def write(self, key: str, value: str) -> None:
        assert self.runs
        self.memory[key] = value
        self.private.add(key)

    def write_disk(self, key: str, value: str) -> None:
        assert self.runs
        assert self.disk is not None
        self.disk.write(key, value)


class FakeVmm:
    kind = VmmKind.QEMU_TCG
    version = "7.2"
    cpu_model = TCG_CPU
    devices = "microvm-2"

    def __init__(self, host: Host) -> None:
        self.host = host

    async def prepare(self, machine: Machine, *, nic: Nic, run_dir: Path) -> FakeVm:
        await self.host.step("prepare")
        return self._start(nic, run_dir, VmState.PREPARED)

    async def boot(self, machine: Machine, *, disk: Disk, nic: Nic, run_dir: Path) -> FakeVm:
        await self.host.step("boot")
        vm = self._start(nic, run_dir, VmState.RUNNING)
        vm.attach(disk)
        return vm

    def _start(self, nic: Nic, run_dir: Path, state: VmState) -> FakeVm:
        vm = FakeVm(self.host, run_dir, state)
        wired = os.fstat(nic.tap_fd).st_ino
        (slot,) = (slot for slot in self.host.slots.values() if slot.tap.fileno() >= 0 and slot.inode == wired)
        slot.vm = vm
        self.host.alive[vm.pid] = (vm, slot)
        self.host.count["started"] += 1
        return vm

    async def adopt(self, pid: int, start_time: int, run_dir: Path) -> FakeVm:
        await self.host.step("adopt")
        found = self.host.alive.get(pid)
        if found is None or found[0].dead or found[0].start_time != start_time:
            raise NotFoundError(f"process {pid} is gone")
        found[0].exited = asyncio.get_running_loop().create_future()  # this daemon may have an event loop of its own
        return found[0]


class FakeProcess:
    """`Process` for the machines of `FakeVmm`."""

    def __init__(self, vm: FakeVm) -> None:
        self.vm = vm

    @classmethod
    def adopt(cls, pid: int, start_time: int) -> FakeProcess:
        vm = VMS.get(pid)
        if vm is None or vm.dead or vm.start_time != start_time:
            raise NotFoundError(f"process {pid} is gone")
        vm.exited = asyncio.get_running_loop().create_future()  # this daemon may have an event loop of its own
        return cls(vm)

    async def kill(self) -> None:
        await self.vm.host.step("kill process")
        self.vm.end("killed")


def processes_in(folder: Path) -> list[tuple[int, int]]:
    return [(vm.pid, vm.start_time) for vm in list(VMS.values()) if vm.run_dir == folder and not vm.dead]


# Network


class FakeSlot:
    def __init__(self, host: Host, index: int) -> None:
        self.host = host
        self.index = index
        self.policy = Policy()
        self.vm: FakeVm | None = None
        self.inits: list[dict[str, Any]] = []
        self.tap, peer = socket.socketpair()
        peer.close()
        self.inode = os.fstat(self.tap.fileno()).st_ino

    def tap_fd(self) -> int:
        return os.dup(self.tap.fileno())

    async def apply(self, policy: Policy) -> None:
        await self.host.step("apply")
        self.policy = policy

    async def connect(self, port: int, timeout: float) -> socket.socket:
        if self.vm is None or self.vm.dead or not self.host.listens:
            raise ConnectionRefusedError("connection refused")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        task = asyncio.create_task(self._serve(theirs))
        self.host.servers.add(task)
        task.add_done_callback(self.host.servers.discard)
        return ours

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            with contextlib.suppress(OSError, AenvError, asyncio.IncompleteReadError):
                await self.host.guest(self, reader, writer)
        finally:
            writer.close()


class FakeSlots:
    def __init__(self, host: Host) -> None:
        self.host = host

    async def take(self) -> FakeSlot:
        await self.host.step("slot")
        slot = FakeSlot(self.host, next(self.host.indices))
        self.host.slots[slot.index] = slot
        return slot

    async def adopt(self, index: int) -> FakeSlot:
        if index not in self.host.slots:
            raise NotFoundError(f"slot {index} is not in use")
        assert index not in self.host.adopted, "a slot can be adopted once"
        self.host.adopted.add(index)
        return self.host.slots[index]

    async def release(self, slot: FakeSlot) -> None:
        await self.host.step("release")
        if self.host.slots.get(slot.index) is slot:
            self.host.adopted.discard(slot.index)
            del self.host.slots[slot.index]
            slot.tap.close()


async def healthy(slot: FakeSlot, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A guest whose agent does what it should."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next((int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")), 0)
    body = await reader.readexactly(length)
    assert slot.vm is not None
    if not slot.vm.runs:
        await asyncio.Event().wait()  # a stopped guest says nothing
    await slot.host.step("answer")
    answer = b""
    if head.startswith("POST /init"):
        slot.inits.append(json.loads(body))
    elif head.startswith("POST /sync"):
        await slot.host.step("sync")
    elif head.startswith("GET /metrics"):
        answer = json.dumps(slot.host.metrics).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
    await writer.drain()


async def silent(slot: FakeSlot, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A guest whose agent accepts and never answers."""
    await asyncio.Event().wait()


# What `aenv.snapshot` does with real layers


async def capture(
    vm: FakeVm,
    *,
    state: Path,
    layer: Path,
    parent: MemoryMap | None,
    beside: Callable[[], Awaitable[None]],
    ahead: bool = True,
) -> Captured[None]:
    known = {} if parent is None else merged([content_of(path) for path in parent.files])
    await vm._do("capture")
    await vm.pause()

    async def collect() -> None:
        await vm._do("collect", VmState.PAUSED)
        changed = {key: vm.memory[key] for key in sorted(vm.private) if vm.memory[key] != known.get(key)}
        with layer.open("x") as file:
            json.dump(changed, file)

    results = await asyncio.gather(vm.save_state(state), collect(), beside(), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            for path in (state, layer):
                path.unlink(missing_ok=True)
            raise result
    stats = CaptureStats(
        dirty_pages=3, stored_pages=2, zero_pages=1, memory_bytes=8192, state_bytes=100,
        pause_s=0.001, state_s=0.001, memory_s=0.001,
    )  # fmt: skip
    return Captured(stats, None)


async def sync_capture(state: Path, layer: Path) -> None:
    for path in (state, layer):
        if not path.exists():
            raise VmmError(f"{path} does not exist")


def memory_map(size: int, base: Path | None, layers: Sequence[Path], zero: Path, *, limit: int | None) -> MemoryMap:
    for layer in layers:
        content_of(layer)
    return MemoryMap(size, (*([] if base is None else [base]), *layers), b"")


async def rehome(vm: FakeVm, stats: CaptureStats, content: MemoryMap) -> int:
    """As far as there is room: half of what was written and is in these files."""
    await vm._do("rehome", VmState.PAUSED)
    mapped = merged([content_of(path) for path in content.files])
    if any(vm.memory.get(key) != value for key, value in mapped.items()):
        raise vm.host.fault(f"rehoming changes memory from {vm.memory} to {mapped}")
    found = sorted(vm.private & mapped.keys())
    pages = found[: (len(found) + 1) // 2]
    vm.private -= set(pages)
    vm.files |= set(content.files)
    return len(pages)


async def compact(layers: Sequence[Path], out: Path, *, below: bool) -> None:
    content = merged([content_of(layer) for layer in layers])
    with out.open("x") as file:
        json.dump(content, file)


def require_boot_files(manifest: object) -> None:
    """There is no kernel."""


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Everything that would look at real processes or layers looks at ours."""
    with contextlib.ExitStack() as stack:
        for name, double in (
            ("machines.capture", capture),
            ("machines.sync_capture", sync_capture),
            ("machines.memory_map", memory_map),
            ("machines.rehome", rehome),
            ("machines.Process", FakeProcess),
            ("machines.processes_in", processes_in),
            ("chains.compact", compact),
        ):
            stack.enter_context(mock.patch(f"aenv.sandbox.{name}", double))
        stack.enter_context(mock.patch("aenv.snapshot.manifest.Manifest.require_boot_files", require_boot_files))
        stack.enter_context(mock.patch("os.fsync"))  # no power fails here
        yield


def vmm_of(host: Host) -> Vmm:
    return cast(Vmm, FakeVmm(host))


def slots_of(host: Host) -> SlotPool:
    return cast(SlotPool, FakeSlots(host))


def blocks_of(host: Host) -> Blocks:
    return cast(Blocks, host.blocks)
