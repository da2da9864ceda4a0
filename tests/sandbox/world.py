"""A home on a host of doubles: daemons come and go on it, by the book or by kill -9."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from aenv.config import Config, load
from aenv.errors import NotFoundError
from aenv.sandbox.machines import Machines, Running
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import CreateOptions, SandboxState
from aenv.sandbox.store import Store
from aenv.sandbox.tokens import Tokens
from aenv.snapshot.checkpoint import INDEX_SUFFIX
from aenv.snapshot.manifest import MANIFEST_NAME
from aenv.storage.disks import Disks
from aenv.storage.home import Home
from aenv.storage.memory import MemoryImages
from aenv.storage.repository import Repository
from aenv.vmm.base import VmState
from tests.sandbox.doubles import Content, FakeSlot, FakeVm, Host, blocks_of, slots_of, vmm_of
from tests.storage.templates import committed

# For tests of what happens when the machine of a paused sandbox ends at once.
ENDED = pytest.mark.parametrize("parked", [0], indirect=True, ids=["ended"])
BASE = CreateOptions(template="base", timeout=300)


def options(**changes: Any) -> CreateOptions:
    return CreateOptions(**{"template": "base", "timeout": 300, **changes})


class LocalHome(Home):
    @property
    def run(self) -> Path:
        return self.root / "run"


class World:
    """A home with a template `base`, on a host."""

    parked = 8  # machines of paused sandboxes that its daemons keep

    def __init__(self, folder: Path, **settings: Any) -> None:
        settings = {"home": folder, "agent.timeout": 5, "vmm.parked": self.parked, **settings}
        self.config: Config = load(settings, {})
        self.home = LocalHome(folder, folder / "cache")
        self.home.create()
        self.repository = Repository(self.home.templates)
        self.template = committed(self.repository, self.home.staging, "base")
        self.host = Host(self.home.run)
        self.tokens = Tokens(b"secret")
        self.machines: Machines
        self.store: Store
        self._wrecks: list[asyncio.AbstractEventLoop] = []

    # Daemons

    async def start(self) -> Manager:
        """A new daemon."""
        memory = MemoryImages(blocks_of(self.host), self.home.images)
        await memory.start()
        self.machines = Machines(
            self.home, vmm_of(self.host), slots_of(self.host), self.repository, Disks(blocks_of(self.host)), memory,
            pool=0, pool_max=0, hot=0,
        )  # fmt: skip
        self.store = Store(self.home.database)
        self.host.adopted.clear()
        manager = Manager(self.config, self.home, self.machines, self.repository, self.store, self.tokens)
        await manager.open()
        return manager

    async def stop(self, manager: Manager) -> None:
        """The end of a daemon by the book."""
        await asyncio.wait_for(manager.close(), 30)
        await self.host.close()

    @contextlib.asynccontextmanager
    async def daemon(self, *, crash: bool = False) -> AsyncIterator[Manager]:
        """With `crash` it just vanishes at the end."""
        manager = await self.start()
        try:
            yield manager
        finally:
            await (self.crash(manager) if crash else self.stop(manager))
        assert self.host.faults == []

    async def crash(self, manager: Manager) -> None:
        """What kill -9 leaves when no operation is under way: nobody says goodbye to the machines."""
        assert not manager._life._tasks
        await manager._life.telemetry.close()
        self._forget(manager)
        await self.host.close()

    def _forget(self, manager: Manager) -> None:
        for sandbox in manager._sandboxes.values():
            manager._life.stop_timer(sandbox)
            manager._life.parking._stop_timer(sandbox)
            sandbox.running = sandbox.parked = None  # its watch sees nothing any more
        self.store.close()

    def killed(self, work: Callable[[Manager], Coroutine[Any, Any, Any]], step: int) -> bool:
        """Run `work` in a daemon that is killed at its `step`th step. False when it has ended before that.

        The daemon has an event loop of its own, which just does not run any more.
        """
        loop = asyncio.new_event_loop()

        async def until_then() -> bool:
            self.host.stop_at = step
            working = asyncio.ensure_future(work(manager))
            async with asyncio.timeout(20):
                while not self.host.stopped_at and not (working.done() and not manager._life._tasks):
                    await asyncio.sleep(0.001)
                if self.host.stopped_at:
                    await asyncio.sleep(0.003)  # all that does not wait for the step goes on until then
                else:
                    await asyncio.gather(working, return_exceptions=True)
            return bool(self.host.stopped_at)

        manager = loop.run_until_complete(self.start())
        stopped = loop.run_until_complete(until_then())
        self.host.stop_at, self.host.stopped_at = None, ""
        self._forget(manager)
        self.host.servers = set()
        self._wrecks.append(loop)
        return stopped

    def clear(self) -> None:
        """Remove what daemons that were killed have left in this process."""
        for loop in self._wrecks:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=10))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
        self._wrecks.clear()
        for slot in self.host.slots.values():
            slot.tap.close()

    # What is there

    def folders(self) -> set[str]:
        return {p.name for p in self.home.sandboxes.iterdir()}

    def files(self, sandbox_id: str) -> set[str]:
        return {p.name for p in (self.home.sandboxes / sandbox_id).iterdir()}


def run(world: World, scenario: Callable[[Manager], Coroutine[Any, Any, None]]) -> None:
    """A scenario in one life of a daemon. At its end all is as it is recorded, and then nothing is left."""

    async def main() -> None:
        async with asyncio.timeout(60):
            async with world.daemon() as manager:
                await scenario(manager)
                await settled(manager)
                quiet(world, manager)
        assert world.host.alive == {}
        assert world.host.slots == {}
        assert world.host.count["started"] == world.host.count["ended"]

    asyncio.run(main())


def running_of(manager: Manager, sandbox_id: str) -> Running:
    running = manager._sandboxes[sandbox_id].running
    assert running is not None
    return running


def vm_of(manager: Manager, sandbox_id: str) -> FakeVm:
    return cast(FakeVm, running_of(manager, sandbox_id).vm)


def slot_of(manager: Manager, sandbox_id: str) -> FakeSlot:
    return cast(FakeSlot, running_of(manager, sandbox_id).slot)


def write(manager: Manager, sandbox_id: str, **values: str) -> None:
    """Have a guest write to its memory and its disk."""
    vm = vm_of(manager, sandbox_id)
    for key, value in values.items():
        vm.write(key, value)
        vm.write_disk(key, value)


def read(manager: Manager, sandbox_id: str) -> tuple[Content, Content]:
    """What a guest has in its memory and on its disk."""
    vm = vm_of(manager, sandbox_id)
    assert vm.disk is not None
    return dict(vm.memory), vm.disk.read()


async def settled(manager: Manager) -> None:
    """Wait for all operations under way, and for those that they begin."""
    await asyncio.sleep(0)
    life = manager._life
    while tasks := life._tasks | life.chains._tasks:
        await asyncio.wait(set(tasks))
        await asyncio.sleep(0)


async def gone(manager: Manager, sandbox_id: str) -> bool:
    try:
        await manager.get(sandbox_id)
    except NotFoundError:
        return True
    return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def agree(world: World, manager: Manager) -> None:
    """Memory is what the store says."""
    assert {r.id: r for r in world.store.load()} == {s.id: s.record for s in manager._sandboxes.values()}


def quiet(world: World, manager: Manager) -> None:
    """What holds whenever no operation is under way: nothing exists that nobody owns, and all is as it is recorded."""
    agree(world, manager)
    assert world.host.faults == []
    sandboxes = manager._sandboxes.values()
    assert {s.state for s in sandboxes} <= {SandboxState.RUNNING, SandboxState.PAUSED}
    assert world.folders() == {s.id for s in sandboxes}
    assert list(world.home.staging.iterdir()) == []
    machines = {s.id: s.running or s.parked for s in sandboxes}
    running = {identity: cast(FakeVm, machine.vm) for identity, machine in machines.items() if machine is not None}
    assert set(world.host.alive) == {vm.pid for vm in running.values()}
    assert set(world.home.run.glob("vm-*")) == {vm.run_dir for vm in running.values()}
    images = world.host.blocks.images.values()
    assert {i.name for i in images if i.data is not None} == {vm.disk.name for vm in running.values() if vm.disk}
    assert {i.name for i in images if i.data is None} == {p.name for p in world.home.images.iterdir()}
    for sandbox in sandboxes:
        record = sandbox.record
        up = record.state is SandboxState.RUNNING
        assert up == (sandbox.running is not None) == (record.machine is not None) == (sandbox.timer is not None)
        assert up == (record.upper is not None)
        assert not (up and record.state_file is not None)
        assert not sandbox.doomed
        assert not sandbox.lock.locked()
        needed = {MANIFEST_NAME, *record.disk, *record.memory, *filter(None, (record.upper, record.state_file))}
        assert sandbox.running is None or sandbox.parked is None
        if (machine := machines[sandbox.id]) is not None:
            vm, disk = running[sandbox.id], machine.disk
            assert vm.state is (VmState.RUNNING if up else VmState.PAUSED)
            assert disk.upper == record.upper or not up
            assert list(disk.layers) == record.disk
            assert list(machine.memory_layers) == record.memory
            needed |= {*disk.layers, disk.upper}
        present = world.files(sandbox.id)
        assert {name for name in present if not name.endswith(INDEX_SUFFIX)} == needed
        assert {Path(name).stem for name in present if name.endswith(INDEX_SUFFIX)} <= {Path(n).stem for n in needed}
