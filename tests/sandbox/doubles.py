"""Stand-ins for machines: everything `Manager` asks of `Machines`, without a VM, and guests that answer HTTP.

A `Host` outlives the daemons that a test starts on it, as the machines of a real one do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import shutil
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from aenv.config import Config, load
from aenv.errors import NotFoundError, VmmError
from aenv.network.base import Policy
from aenv.network.slot import Slot
from aenv.sandbox.machines import Machines, Running
from aenv.sandbox.manager import Manager
from aenv.sandbox.store import Machine, Store
from aenv.sandbox.tokens import Tokens
from aenv.snapshot.capture import CaptureStats
from aenv.storage.repository import Repository, Template
from aenv.vmm.base import Disk, Exit, Vm
from tests.storage.templates import committed

STATS = CaptureStats(3, 2, 1, 8192, 100, 0.001, 0.001, 0.001, 0.001)
METRICS = {
    "ts": 1, "cpu_count": 1, "cpu_used_pct": 1.5, "mem_total": 100, "mem_used": 50, "disk_used": 5, "disk_total": 10,
}  # fmt: skip
GuestHandler = Callable[["FakeSlot", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class FakeVm:
    def __init__(self, host: Host, run_dir: Path) -> None:
        self.host = host
        self.pid = next(host.pids)
        self.start_time = 1000 + self.pid
        self.run_dir = run_dir
        self.runs = False
        self.dead = False
        self.console = b""
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    async def resume(self) -> None:
        await self.host.step("resume")
        if self.dead:
            raise VmmError("the machine is gone")
        self.runs = True

    async def pause(self) -> None:
        await self.host.step("vm.pause")
        if self.dead:
            raise VmmError("the machine is gone")
        self.runs = False

    async def serial_since(self, position: int) -> tuple[bytes, int]:
        return self.console[position:], len(self.console)

    async def serial_tail(self, limit: int = 4096) -> str:
        return "last words on the console"

    def die(self, reason: str = "killed by signal 9") -> None:
        """The process ends by itself."""
        self.runs = False
        self.dead = True
        if not self.exited.done():
            self.exited.set_result(Exit(reason, "kernel panic"))


class FakeSlot:
    def __init__(self, host: Host, index: int) -> None:
        self.host = host
        self.index = index
        self.policy = Policy()
        self.vm: FakeVm | None = None
        self.inits: list[dict[str, Any]] = []

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
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self.host.guest(self, reader, writer)
        finally:
            writer.close()


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


class Host:
    """The machines of one host. `fail` maps a step to the error it raises, `hold` to what it waits for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.alive: dict[int, tuple[FakeVm, FakeSlot]] = {}  # by slot index
        self.disks: dict[int, Path] = {}  # by slot index
        self.adopted: set[int] = set()
        self.pids = itertools.count(100)
        self.slots = itertools.count(1)
        self.count: Counter[str] = Counter()
        self.fail: dict[str, Exception] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}
        self.guest: GuestHandler = healthy
        self.listens = True
        self.metrics: dict[str, Any] = dict(METRICS)
        self.servers: set[asyncio.Task[None]] = set()
        self.jitter: Callable[[], float] | None = None
        root.mkdir(parents=True, exist_ok=True)

    async def step(self, name: str) -> None:
        """A point where a test can wait, delay or fail."""
        self.count[name] += 1
        self.reached.setdefault(name, asyncio.Event()).set()
        if name in self.hold:
            await self.hold[name].wait()
        if self.jitter is not None:
            await asyncio.sleep(self.jitter())
        if name in self.fail:
            raise self.fail[name]

    async def until(self, name: str) -> None:
        """Wait until a step is reached (again: clear `reached` first)."""
        await asyncio.wait_for(self.reached.setdefault(name, asyncio.Event()).wait(), 10)

    def start(self, disk: Path | None = None) -> Running:
        assert disk is None or disk not in self.disks.values(), "two machines write to one disk"
        vm, slot = FakeVm(self, self.root / f"vm-{secrets.token_hex(4)}"), FakeSlot(self, next(self.slots))
        slot.vm = vm
        vm.run_dir.mkdir()
        self.alive[slot.index] = (vm, slot)
        if disk is not None:
            self.disks[slot.index] = disk
        self.count["started"] += 1
        return Running(cast(Vm, vm), cast(Slot, slot), secrets.token_hex(8))

    def stop(self, index: int) -> None:
        vm, _ = self.alive.pop(index)
        self.disks.pop(index, None)
        self.count["ended"] += 1
        shutil.rmtree(vm.run_dir, ignore_errors=True)
        vm.die("killed")

    async def close(self) -> None:
        for task in list(self.servers):
            task.cancel()
        await asyncio.gather(*self.servers, return_exceptions=True)


class FakeMachines:
    """The methods of `Machines`, on a `Host`."""

    kind = "qemu-tcg"
    version = "7.2"

    def __init__(self, host: Host, sandboxes: Path) -> None:
        self.host = host
        self.sandboxes = sandboxes
        self.warmed: list[str] = []
        self.closed = False
        sandboxes.mkdir(parents=True, exist_ok=True)

    def directory(self, sandbox_id: str) -> Path:
        return self.sandboxes / sandbox_id

    def new_disk(self, sandbox_id: str, template: Template) -> Disk:
        if "new_disk" in self.host.fail:
            raise self.host.fail["new_disk"]
        self.directory(sandbox_id).mkdir()
        self.disk(sandbox_id, template).path.write_bytes(b"")
        return self.disk(sandbox_id, template)

    def disk(self, sandbox_id: str, template: Template) -> Disk:
        return Disk(self.directory(sandbox_id) / "disk.qcow2", "qcow2", backing=template.disk)

    async def warm(self, template_id: str) -> None:
        self.warmed.append(template_id)

    async def expect_resume(self, template_id: str) -> None:
        self.warmed.append(template_id)

    async def start(self, template: Template, sandbox_id: str, policy: Policy) -> Running:
        return await self.restore(template, self.new_disk(sandbox_id, template), policy)

    async def cool(self, template_id: str) -> None:
        await self.host.step("cool")

    async def restore(self, template: Template, disk: Disk, policy: Policy, paused: Path | None = None) -> Running:
        await self.host.step("restore")
        assert disk.path.exists()
        if paused is not None and not (paused / "state").exists():
            raise VmmError("there is no state to restore")
        running = self.host.start(disk.path)
        cast(FakeSlot, running.slot).policy = policy
        return running

    async def boot(self, template: Template, disk: Disk, policy: Policy) -> Running:
        await self.host.step("boot")
        assert disk.path.exists()
        return self.host.start(disk.path)

    async def capture_pause(self, running: Running, template: Template, target: Path) -> CaptureStats:
        vm = cast(FakeVm, running.vm)
        if vm.dead:
            raise VmmError("the machine is gone")
        vm.runs = False
        await self.host.step("capture")
        target.mkdir()
        (target / "state").write_bytes(b"state")
        return STATS

    async def end(self, running: Running) -> None:
        running.close()
        await self.host.step("end")
        self.host.stop(running.slot.index)

    async def adopt(self, machine: Machine) -> Running:
        await self.host.step("adopt")
        found = self.host.alive.get(machine.slot)
        if found is None or found[0].dead or found[0].pid != machine.pid:
            raise NotFoundError(f"process {machine.pid} is gone")
        assert machine.slot not in self.host.adopted, "a slot can be adopted once"
        self.host.adopted.add(machine.slot)
        return Running(cast(Vm, found[0]), cast(Slot, found[1]), machine.incarnation)

    async def abandon(self, machine: Machine) -> None:
        await self.host.step("abandon")
        assert machine.slot not in self.host.adopted, "an adopted machine is ended, not abandoned"
        if machine.slot in self.host.alive:
            self.host.stop(machine.slot)

    async def sweep(self, keep: set[Path]) -> int:
        doomed = [index for index, (vm, _) in self.host.alive.items() if vm.run_dir not in keep]
        for index in doomed:
            self.host.stop(index)
        return len(doomed)

    def folders(self) -> list[Path]:
        return [path for path in self.sandboxes.iterdir() if path.is_dir()]

    async def close(self) -> None:
        self.closed = True


class World:
    """A home with a template `base`, on a host."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        settings = {"home": folder, "agent.timeout": 5, **settings}
        self.config: Config = load(settings, {})
        (folder / "templates").mkdir(parents=True)
        self.repository = Repository(folder / "templates")
        self.template = committed(self.repository, folder / "staging", "base")
        self.host = Host(folder / "run")
        self.tokens = Tokens(b"secret")
        self.database = folder / "aenv.db"
        self.machines: FakeMachines
        self.store: Store

    @contextlib.asynccontextmanager
    async def daemon(self, *, crash: bool = False) -> AsyncIterator[Manager]:
        """A manager, opened and closed; with `crash` it just vanishes at the end."""
        manager = self.new_manager()
        await manager.open()
        try:
            yield manager
        finally:
            if crash:
                await self.crash(manager)
            else:
                await asyncio.wait_for(manager.close(), 30)
                await self.host.close()

    def new_manager(self) -> Manager:
        self.machines = FakeMachines(self.host, self.folder / "sandboxes")
        self.store = Store(self.database)
        self.host.adopted.clear()
        return Manager(self.config, cast(Machines, self.machines), self.repository, self.store, self.tokens)

    async def crash(self, manager: Manager) -> None:
        """What kill -9 leaves when no operation is under way: nobody says goodbye to the machines."""
        assert not manager._tasks
        assert manager._sampler is not None
        manager._sampler.cancel()
        await asyncio.gather(manager._sampler, return_exceptions=True)
        for sandbox in manager._sandboxes.values():
            manager._stop_timer(sandbox)
            sandbox.running = None  # its watch sees nothing any more
        self.store.close()
        await self.host.close()

    def folders(self) -> set[str]:
        return {p.name for p in (self.folder / "sandboxes").iterdir()}
